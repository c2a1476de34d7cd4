//! The stored alerts, on the writer. The process owns the file, so the lease of the judge and the nodes are in memory
//! only.

use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::alert_board::{
    AlertMoment, AlertReport, AlertState, AlertsNoted, Silence, StoredAlert, note,
};
use hapax_core::message::MessageData;
use hapax_core::own_messages::ActiveAlert;
use hapax_core::store::{AlertRecords, CheckIn, CheckedIn, NodeRecord, SilenceAsk, StoreError};
use rusqlite::{Connection, Row};
use uuid::Uuid;

use super::Outbox;
use crate::sqlite::SqliteStore;
use crate::sqlite::row::{micros, timestamp};

const COLUMNS: &str = "subject, data, reporter, state, found, published, since, seen_at, \
                       silenced_until, silence_reason, silenced_by";

impl AlertRecords for SqliteStore {
    async fn check_in(&self, checked: CheckIn) -> Result<CheckedIn, StoreError> {
        let CheckIn { node, name, lease, handlers } = checked;
        let is_judge = self
            .writer
            .behind(move |writer| {
                let now = micros(writer.now());
                let judge = &mut writer.outbox.alert_judge;
                let is_judge = judge.is_none_or(|(holder, until)| holder == node || until <= now);
                if is_judge {
                    *judge = Some((node, now.saturating_add(span(lease))));
                }
                Ok(is_judge)
            })
            .await?;
        let now = (self.clock.0)();
        let handlers = self.shared.nodes().check_in(node, name, handlers, now);
        Ok(CheckedIn { is_judge, handlers })
    }

    async fn check_out(&self, node: Uuid) -> Result<(), StoreError> {
        self.shared.nodes().check_out(node);
        Ok(())
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>, StoreError> {
        Ok(self.shared.nodes().listed((self.clock.0)()))
    }

    async fn note_alerts(&self, report: AlertReport) -> Result<AlertsNoted, StoreError> {
        self.writer
            .behind(move |writer| {
                writer.in_transaction(|writer| {
                    let now = writer.now();
                    writer.outbox.note_alerts(&writer.conn, report, now)
                })
            })
            .await
    }

    async fn alerts(&self) -> Result<Vec<StoredAlert>, StoreError> {
        let now = (self.clock.0)();
        let mut rows = self.readers.run(rows).await?;
        rows.retain(|row| row.is_listed(now));
        rows.iter_mut().for_each(|row| hide_ended(row, now));
        Ok(rows)
    }

    async fn silence_alert(&self, ask: SilenceAsk) -> Result<Option<StoredAlert>, StoreError> {
        self.writer
            .act(move |writer| {
                let now = writer.now();
                let found = rows(&writer.conn)?.into_iter().find(|row| row.alert.key() == ask.id);
                let Some(mut row) = found else { return Ok(None) };
                let SilenceAsk { span: length, reason, who, .. } = ask;
                let until = timestamp(micros(now).saturating_add(span(length)));
                row.silence = Some(Silence { until, reason, who });
                write(&writer.conn, &row)?;
                hide_ended(&mut row, now);
                Ok(Some(row))
            })
            .await
    }
}

impl Outbox {
    fn note_alerts(
        &mut self,
        conn: &Connection,
        report: AlertReport,
        now: Timestamp,
    ) -> rusqlite::Result<AlertsNoted> {
        let judge = self.alert_judge;
        let moment = AlertMoment {
            now,
            holds_lease: judge
                .is_some_and(|(node, until)| node == report.node && until > micros(now)),
            is_wanted: self.wants_alerts(),
        };
        let changes = note(rows(conn)?, report, moment);
        for subject in &changes.deleted {
            conn.prepare_cached("DELETE FROM hapax_alert WHERE subject = ?1")?
                .execute([subject])?;
        }
        for row in &changes.written {
            write(conn, row)?;
        }
        for message in changes.published {
            self.publish_own(conn, Some(message), now)?;
        }
        Ok(changes.noted)
    }
}

fn write(conn: &Connection, row: &StoredAlert) -> rusqlite::Result<()> {
    let silence = row.silence.as_ref();
    conn.prepare_cached(&format!(
        "INSERT OR REPLACE INTO hapax_alert ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)"
    ))?
    .execute((
        &row.alert.subject,
        row.alert.data.as_str(),
        row.reporter.as_bytes(),
        row.state.code(),
        row.is_found,
        row.is_published,
        micros(row.since),
        micros(row.seen_at),
        silence.map(|silence| micros(silence.until)),
        silence.map(|silence| &silence.reason),
        silence.map(|silence| &silence.who),
    ))?;
    Ok(())
}

fn rows(conn: &Connection) -> rusqlite::Result<Vec<StoredAlert>> {
    conn.prepare_cached(&format!("SELECT {COLUMNS} FROM hapax_alert ORDER BY subject"))?
        .query_map([], stored)?
        .collect()
}

fn stored(row: &Row<'_>) -> rusqlite::Result<StoredAlert> {
    let data: String = row.get(1)?;
    let until: Option<i64> = row.get(8)?;
    let silence = match until {
        Some(until) => {
            let until = timestamp(until);
            Some(Silence { until, reason: row.get(9)?, who: row.get(10)? })
        }
        None => None,
    };
    Ok(StoredAlert {
        alert: ActiveAlert {
            subject: row.get(0)?,
            data: MessageData::parse(data).expect("it was JSON when it was written"),
        },
        reporter: Uuid::from_bytes(row.get(2)?),
        state: AlertState::from_code(row.get(3)?).expect("a state that was written"),
        is_found: row.get(4)?,
        is_published: row.get(5)?,
        since: timestamp(row.get(6)?),
        seen_at: timestamp(row.get(7)?),
        silence,
    })
}

fn hide_ended(row: &mut StoredAlert, now: Timestamp) {
    row.silence.take_if(|silence| silence.until <= now);
}

fn span(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}
