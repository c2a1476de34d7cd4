//! The stored alerts. A report is decided here and written by one statement, which changes nothing if another
//! report came between reading and writing, or if the lease of the judge has ended.

use std::time::Duration;

use hapax_core::alert_board::{
    AlertChanges, AlertMoment, AlertReport, AlertState, AlertsNoted, LISTED_FOR, Silence,
    StoredAlert, note,
};
use hapax_core::job::HandlerName;
use hapax_core::message::MessageData;
use hapax_core::own_messages::{ALERT_RAISED, ActiveAlert};
use hapax_core::store::{
    AlertRecords, CheckIn, CheckedIn, HandlerRef, NodeRecord, SeenNode, SilenceAsk, StoreError,
    listed_nodes,
};
use hapax_core::{SourceName, Timestamp};
use serde_json::json;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::postgres::connect::{PgError, retried};
use crate::postgres::jobs::only;
use crate::postgres::reader::read;
use crate::postgres::row::text;
use crate::postgres::{PgStore, Shared};

/// How often a report is decided again because another report was written first. Each report that another
/// node writes in between costs one try.
const TRIES: usize = 30;

impl AlertRecords for PgStore {
    async fn check_in(&self, checked: CheckIn) -> Result<CheckedIn, StoreError> {
        self.act(move |shared| async move { retried(|| check_in(&shared, &checked)).await }).await
    }

    async fn check_out(&self, node: Uuid) -> Result<(), StoreError> {
        self.act(move |shared| async move {
            let mut client = shared.pools.admin.checkout().await?;
            client.query("UPDATE hapax.node SET stopped = true WHERE node = $1", &[&node]).await?;
            Ok(())
        })
        .await
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>, StoreError> {
        let mut client = self.shared.pools.admin.checkout().await.map_err(read)?;
        let sql = "SELECT node, name, started_at, seen_at, stopped, coalesce($1, clock_timestamp()) \
                   FROM hapax.node";
        let rows = client.query(sql, &[&self.shared.now()]).await.map_err(read)?;
        let seen = |row: &Row| SeenNode {
            node: row.get(0),
            name: row.get(1),
            started_at: row.get(2),
            seen_at: row.get(3),
            is_stopped: row.get(4),
        };
        let now = rows.first().map_or(Timestamp::MIN, |row| row.get(5));
        Ok(listed_nodes(rows.iter().map(seen).collect(), now))
    }

    async fn note_alerts(&self, report: AlertReport) -> Result<AlertsNoted, StoreError> {
        let noted = self.act(move |shared| async move {
            for _ in 0..TRIES {
                let board = board(&shared).await?;
                let moment = AlertMoment {
                    now: board.now,
                    holds_lease: board.judge == Some(report.node),
                    is_wanted: board.is_wanted,
                };
                let changes = note(board.rows, report.clone(), moment);
                let node = changes.noted.judged.then_some(report.node);
                if retried(|| write(&shared, board.version, node, &changes)).await? {
                    return Ok(Some(changes.noted));
                }
            }
            Ok(None)
        });
        noted.await?.ok_or(StoreError::Busy)
    }

    async fn alerts(&self) -> Result<Vec<StoredAlert>, StoreError> {
        let StoredAlerts { mut rows, now, .. } = board(&self.shared).await.map_err(read)?;
        rows.retain(|row| row.is_listed(now));
        rows.iter_mut().for_each(|row| hide_ended(row, now));
        Ok(rows)
    }

    async fn silence_alert(&self, ask: SilenceAsk) -> Result<Option<StoredAlert>, StoreError> {
        self.act(move |shared| async move {
            let SilenceAsk { id, span, reason, who } = &ask;
            let (reason, who) = (text(reason), text(who));
            let mut client = shared.pools.admin.checkout().await?;
            let sql = "SELECT hapax.silence_alert($1, $2, $3, $4, $5)";
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
                [id, &micros(*span), &reason, &who, &shared.now()];
            let rows = client.query(sql, &values).await?;
            if !only(&rows)?.get::<_, bool>(0) {
                return Ok(None);
            }
            drop(client);
            let StoredAlerts { rows, now, .. } = board(&shared).await?;
            let found = rows.into_iter().find(|row| row.alert.key() == *id);
            Ok(found.map(|mut row| {
                hide_ended(&mut row, now);
                row
            }))
        })
        .await
    }
}

async fn check_in(shared: &Shared, checked: &CheckIn) -> Result<CheckedIn, PgError> {
    let CheckIn { node, name, lease, handlers } = checked;
    let names = handlers.iter().map(|one| [text(one.source.as_str()), text(one.handler.as_str())]);
    let names = serde_json::to_string(&names.collect::<Vec<_>>()).expect("names are JSON");
    let alive = i64::try_from(LISTED_FOR.as_micros()).unwrap_or(i64::MAX);
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT is_judge, handlers FROM hapax.check_in($1, $2, $3, $4, $5, $6)",
            &[node, &text(name), &micros(*lease), &names, &alive, &shared.now()],
        )
        .await?;
    let row = only(&rows)?;
    let handlers = row.get::<_, Vec<String>>(1).into_iter().flat_map(|names| {
        serde_json::from_str::<Vec<(String, String)>>(&names).unwrap_or_default()
    });
    let handler = |(source, handler): (String, String)| HandlerRef {
        source: SourceName::new(source),
        handler: HandlerName::new(handler),
    };
    Ok(CheckedIn { is_judge: row.get(0), handlers: handlers.map(handler).collect() })
}

/// All of the stored alerts, at one moment.
struct StoredAlerts {
    version: i64,
    judge: Option<Uuid>,
    is_wanted: bool,
    now: Timestamp,
    rows: Vec<StoredAlert>,
}

async fn board(shared: &Shared) -> Result<StoredAlerts, PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT b.version, CASE WHEN b.judge_until > t.now THEN b.judge END, hapax.wants_own($2), t.now, \
                    a.subject, a.data, a.reporter, a.state, a.found, a.published, a.since, a.seen_at, \
                    a.silenced_until, a.silence_reason, a.silenced_by \
             FROM hapax.alert_board b \
             CROSS JOIN (SELECT coalesce($1, clock_timestamp()) AS now) t \
             LEFT JOIN hapax.alert a ON true ORDER BY a.subject",
            &[&shared.now(), &ALERT_RAISED],
        )
        .await?;
    let first = only(&rows)?;
    Ok(StoredAlerts {
        version: first.get(0),
        judge: first.get(1),
        is_wanted: first.get(2),
        now: first.get(3),
        rows: rows.iter().filter_map(stored).collect(),
    })
}

/// `None` for the row of an empty board.
fn stored(row: &Row) -> Option<StoredAlert> {
    let subject: Option<String> = row.get(4);
    let until: Option<Timestamp> = row.get(12);
    Some(StoredAlert {
        alert: ActiveAlert {
            subject: subject?,
            data: MessageData::parse(row.get::<_, String>(5))
                .expect("it was JSON when it was written"),
        },
        reporter: row.get(6),
        state: AlertState::from_code(row.get(7)).expect("a state that was written"),
        is_found: row.get(8),
        is_published: row.get(9),
        since: row.get(10),
        seen_at: row.get(11),
        silence: until.map(|until| Silence { until, reason: row.get(13), who: row.get(14) }),
    })
}

/// Writes the changes, and returns whether they were written. `node` is the judge whose findings
/// they contain, if any.
async fn write(
    shared: &Shared,
    version: i64,
    node: Option<Uuid>,
    changes: &AlertChanges,
) -> Result<bool, PgError> {
    let row = |row: &StoredAlert| {
        let silence = row.silence.as_ref();
        json!({
            "subject": row.alert.subject,
            "key": row.alert.key(),
            "data": row.alert.data.as_str(),
            "reporter": row.reporter,
            "state": row.state.code(),
            "found": row.is_found,
            "published": row.is_published,
            "since": row.since,
            "seen_at": row.seen_at,
            "silenced_until": silence.map(|silence| silence.until),
            "silence_reason": silence.map(|silence| &silence.reason),
            "silenced_by": silence.map(|silence| &silence.who),
        })
    };
    let rows = serde_json::Value::from_iter(changes.written.iter().map(row)).to_string();
    let published = &changes.published;
    let types: Vec<&str> = published.iter().map(|message| message.r#type.as_str()).collect();
    let datas: Vec<&str> = published.iter().map(|message| message.data.as_str()).collect();
    let keys: Vec<Option<&str>> = published.iter().map(|message| message.key.as_deref()).collect();
    let mut client = shared.pools.admin.checkout().await?;
    let sql = "SELECT hapax.write_alerts($1, $2, $3, $4, $5, $6, $7, $8)";
    let written = client
        .query(
            sql,
            &[&version, &node, &rows, &changes.deleted, &types, &datas, &keys, &shared.now()],
        )
        .await?;
    Ok(only(&written)?.get(0))
}

fn hide_ended(row: &mut StoredAlert, now: Timestamp) {
    row.silence.take_if(|silence| silence.until <= now);
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}
