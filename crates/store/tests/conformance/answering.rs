//! An API's effects and its answer are one commit, on every database with transactions: both are
//! there, or neither. The user's table has no unique constraint, which would hide a double effect.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::ledger::{Reservation, Reserved, StoredAnswer};
use hapax_core::limits::ANSWER_BODY_BYTES_MAX;
use hapax_core::store::{Held, NewMessage};
use hapax_sim::Postgres;
use hapax_store::{Answering, Failure, PgOptions, PgStore, SqliteStore, TxError};
use serde_json::json;

use crate::harness::{Clock, Working, World, pg_database};
use crate::ledger::{answer, ask};

const TIME: Duration = Duration::from_secs(30);

/// The work of an attempt, besides writing its one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Well,
    /// The work publishes a message as well.
    Publishes,
    /// A statement is refused.
    Badly,
    /// The code itself returns an error.
    GivesUp,
}

/// A database, and a table of the user's in it.
struct Setup<S> {
    world: World<S>,
    outside: Outside,
}

/// Reads the database as another client.
enum Outside {
    File(std::path::PathBuf),
    Url(String),
}

impl Outside {
    async fn number(&self, sql: &str) -> i64 {
        match self {
            Self::File(file) => {
                let conn = rusqlite::Connection::open(file).expect("opens");
                conn.query_row(sql, [], |row| row.get(0)).expect("counts")
            }
            Self::Url(url) => {
                let rows = Postgres::execute_at(url, sql).await;
                rows[0].as_deref().expect("a value").parse().expect("a number")
            }
        }
    }
}

impl Setup<SqliteStore> {
    async fn on_disk() -> Self {
        let world = World::on_disk();
        let file = world.place.as_ref().expect("it lives on a disk").file();
        let conn = rusqlite::Connection::open(&file).expect("opens");
        conn.execute_batch("CREATE TABLE charges (n)").expect("the user's table");
        Self { world, outside: Outside::File(file) }
    }
}

impl Setup<PgStore> {
    async fn on_postgres() -> Self {
        let (clock, url) = (Clock::default(), pg_database().await);
        Postgres::execute_at(&url, "CREATE TABLE charges (n int)").await;
        let mut options = PgOptions::new(url.as_str());
        options.clock = Some(clock.for_a_store());
        let store = Arc::new(PgStore::open(options).await.expect("opens"));
        Self { world: World { store, clock, place: None }, outside: Outside::Url(url) }
    }
}

/// A store whose transactions the cases can use without knowing whether they are closures or open.
trait Charging: Working + Answering {
    /// The table of messages, for reads by another client.
    const MESSAGES: &str;

    /// Writes one row and does the other work, then stores the answer.
    async fn charge(
        self: &Arc<Self>,
        reserved: &Reserved,
        work: Work,
        answer: StoredAnswer,
    ) -> Result<StoredAnswer, TxError>;
}

fn message() -> NewMessage {
    NewMessage::new("charged", json!({})).with_id("msg_1")
}

impl Charging for SqliteStore {
    const MESSAGES: &str = "SELECT count(*) FROM hapax_message
                            WHERE tenant = 'default' AND event_seq IS NULL";

    async fn charge(
        self: &Arc<Self>,
        reserved: &Reserved,
        work: Work,
        answer: StoredAnswer,
    ) -> Result<StoredAnswer, TxError> {
        let charged = self.answering(reserved, TIME).commit(move |db| {
            db.execute("INSERT INTO charges VALUES (1)", [])?;
            match work {
                Work::Well => {}
                Work::Publishes => db.publish(&message())?,
                Work::Badly => drop(db.execute("INSERT INTO nowhere VALUES (1)", [])?),
                Work::GivesUp => return Err(Failure::new("no such card")),
            }
            Ok(answer)
        });
        charged.await
    }
}

impl Charging for PgStore {
    const MESSAGES: &str = "SELECT count(*) FROM hapax.message
                            WHERE tenant = 'default' AND event IS NULL";

    async fn charge(
        self: &Arc<Self>,
        reserved: &Reserved,
        work: Work,
        answer: StoredAnswer,
    ) -> Result<StoredAnswer, TxError> {
        let mut db = self.answering(reserved, TIME).begin().await?;
        db.execute("INSERT INTO charges VALUES (1)", &[]).await.expect("inserts");
        match work {
            Work::Well => {}
            Work::Publishes => db.publish(&message()).await.expect("publishes"),
            // The code ignores the error, and commits anyway.
            Work::Badly => drop(db.execute("INSERT INTO nowhere VALUES (1)", &[]).await),
            Work::GivesUp => return Err(TxError::Failed(Failure::new("no such card"))),
        }
        db.commit(answer).await
    }
}

impl<S: Charging> Setup<S> {
    async fn fresh(&self) -> Reserved {
        match self.reserve_again().await {
            Reservation::Fresh(reserved) => reserved,
            other => panic!("{other:?}"),
        }
    }

    async fn reserve_again(&self) -> Reservation {
        self.world.store.reserve(ask("k", "request")).await.expect("reserves")
    }

    async fn charge(&self, reserved: &Reserved, work: Work) -> Result<StoredAnswer, TxError> {
        self.world.store.charge(reserved, work, answer("charged")).await
    }

    async fn charges(&self) -> i64 {
        self.outside.number("SELECT count(*) FROM charges").await
    }
}

async fn effects_and_answer_are_one_commit_once_per_fence<S: Charging>(setup: Setup<S>) {
    // The same reservation commits a second time, with another answer, and then calls `finish`.
    let reserved = setup.fresh().await;
    let kept = setup.charge(&reserved, Work::Publishes).await.expect("commits");
    assert_eq!(kept, answer("charged"));
    let second = setup.world.store.charge(&reserved, Work::Well, answer("second")).await;
    assert!(matches!(second, Err(TxError::FenceLost)), "{second:?}");
    let held = setup.world.store.finish(&reserved, &answer("third")).await.expect("finishes");
    assert_eq!(held, Held::Lost);
    assert_eq!(setup.reserve_again().await, Reservation::Replay(answer("charged")));
    assert_eq!(setup.charges().await, 1);
    assert_eq!(setup.outside.number(S::MESSAGES).await, 1, "of no event");
}

async fn a_lost_fence_leaves_neither<S: Charging>(setup: Setup<S>) {
    // Three cases: the lease ended and another attempt runs; that attempt gave up and none runs;
    // another attempt is done.
    let first = setup.fresh().await;
    setup.world.pass(61);
    let second = setup.fresh().await;
    let late = setup.charge(&first, Work::Well).await;
    assert!(matches!(late, Err(TxError::FenceLost)), "{late:?}");
    setup.world.store.abandon(&second).await.expect("abandons");
    let gone = setup.charge(&second, Work::Well).await;
    assert!(matches!(gone, Err(TxError::FenceLost)), "{gone:?}");
    assert_eq!(setup.charges().await, 0);
    let third = setup.fresh().await;
    setup.charge(&third, Work::Well).await.expect("commits");
    for old in [&first, &second] {
        let late = setup.charge(old, Work::Well).await;
        assert!(matches!(late, Err(TxError::FenceLost)), "{late:?}");
    }
    assert_eq!(setup.charges().await, 1);
}

async fn a_failed_or_dropped_transaction_leaves_neither_and_the_key_to_its_right<S: Charging>(
    setup: Setup<S>,
) {
    // Four cases: a refused statement, an abandoned reservation, an answer too large to store, an
    // unused reservation.
    let reserved = setup.fresh().await;
    for work in [Work::Badly, Work::GivesUp] {
        let failed = setup.charge(&reserved, work).await;
        assert!(matches!(failed, Err(TxError::Failed(_))), "{work:?}: {failed:?}");
    }
    let huge = StoredAnswer { body: vec![0; ANSWER_BODY_BYTES_MAX + 1].into(), ..answer("") };
    let failed = setup.world.store.charge(&reserved, Work::Well, huge).await;
    assert!(matches!(&failed, Err(TxError::Failed(why)) if why.error().contains("too large")));
    drop(setup.world.store.answering(&reserved, TIME));
    let reservation = setup.reserve_again().await;
    assert!(matches!(reservation, Reservation::InProgress { .. }), "{reservation:?}");
    assert_eq!(setup.charges().await, 0);
    setup.charge(&reserved, Work::Well).await.expect("the right still holds");
    assert_eq!(setup.reserve_again().await, Reservation::Replay(answer("charged")));
    assert_eq!(setup.charges().await, 1);
}

async fn a_commit_after_the_lease_counts_while_no_other_attempt_runs<S: Charging>(setup: Setup<S>) {
    // The attempt was slow and the key was not reserved again: the work is done, and another
    // attempt would repeat its effects.
    let reserved = setup.fresh().await;
    setup.world.pass(3_600);
    setup.charge(&reserved, Work::Well).await.expect("commits");
    assert_eq!(setup.reserve_again().await, Reservation::Replay(answer("charged")));
    assert_eq!(setup.charges().await, 1);
}

macro_rules! on_every_database {
    ($($case:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case(super::Setup::on_disk().await).await;
            })*
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case(super::Setup::on_postgres().await).await;
            })*
        }
    };
}

on_every_database! {
    effects_and_answer_are_one_commit_once_per_fence,
    a_lost_fence_leaves_neither,
    a_failed_or_dropped_transaction_leaves_neither_and_the_key_to_its_right,
    a_commit_after_the_lease_counts_while_no_other_attempt_runs,
}
