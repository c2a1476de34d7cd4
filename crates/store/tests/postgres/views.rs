//! The views that people query with any client, for a role that may only read them.

use hapax_core::store::{Outcome, Store, Work};

use crate::harness::{Sender, after, body, noon};
use crate::{Base, connect, spec};

const VIEWS: [&str; 5] = ["processed_events", "arrivals", "attempts", "dead_letters", "deliveries"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_only_read_the_views_can_read_them_whatever_was_sent() {
    // The role may read only the views, and one body is not text and not complete.
    let base = Base::new("views", spec(1)).await;
    base.accept("good", None).await;
    base.accept("bad", None).await;
    base.accept("open", None).await;
    let claims = base.claim(2).await;
    let outcomes = [
        Outcome::Done { result: Some("fee\0 of 50".into()), publish: Vec::new(), answer: None },
        Outcome::Failed {
            error: "no\0 such account".into(),
            retry: hapax_core::job::Retry::Never,
            answer: None,
        },
    ];
    for (claim, outcome) in claims.iter().zip(outcomes) {
        base.store.settle(claim.job, claim.fence, outcome).await.expect("settles");
    }
    let late = Sender::plain().ingest_at(&body("late"), noon(), after(86_400));
    base.store.ingest(late).await.expect("ingests");
    base.sql
        .batch_execute(
            r"UPDATE hapax.body SET body = '\x7b2200ff' || body;
              UPDATE hapax.event SET event_type = '\xff00' WHERE event_id = 'bad'",
        )
        .await
        .expect("odd bytes");
    let role = format!("reader_{}", claims[0].job.0.simple());
    base.sql
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN;
             GRANT SELECT ON hapax.processed_events, hapax.arrivals, hapax.attempts,
                 hapax.dead_letters, hapax.deliveries TO {role}"
        ))
        .await
        .expect("a role");
    let reader = connect(&base.url).await;
    reader.batch_execute(&format!("SET SESSION AUTHORIZATION {role}")).await.expect("a session");
    let mut counts = Vec::new();
    for view in VIEWS {
        let sql = format!("SELECT to_jsonb(v)::text FROM hapax.{view} v");
        counts.push(reader.query(&sql, &[]).await.map(|rows| rows.len()).map_err(|error| {
            format!("{view}: {}", error.as_db_error().map_or("", |db| db.message()))
        }));
    }
    assert_eq!(counts, [Ok(4), Ok(4), Ok(2), Ok(1), Ok(0)]);
    let strip = "SELECT hapax.strip(NULL, NULL, NULL, 1)";
    for other in ["SELECT FROM hapax.event", strip] {
        let refused = reader.query(other, &[]).await.expect_err(other);
        assert_eq!(refused.code().map(|code| code.code()), Some("42501"), "{other}");
    }
    base.sql
        .batch_execute(&format!("DROP OWNED BY {role} CASCADE; DROP ROLE {role}"))
        .await
        .expect("goes");
}
