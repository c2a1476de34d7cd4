//! The index over the values that operators search for.
//!
//! Events are read in the order of their ids, which contain the time of the node that accepted them. A
//! node whose clock is behind gives its event an id among those of older events. So a first walk stays a
//! few seconds behind, and a second walk, an hour behind, adds the events that the first one missed. The
//! mark of each walk moves in the commit of the rows.

use std::sync::Arc;

use hapax_core::limits::{REQUEST_TIME_MAX, TRACED_EVENTS_MAX};
use hapax_core::search::SearchFields;
use hapax_core::store::{EventId, SearchIndex, StoreError, TextSearch};
use hapax_core::{KeyHash, SourceName, Timestamp, failpoint};
use jiff::SignedDuration;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::connect::PgError;
use super::jobs::only;
use super::reader::{Conditions, read};
use super::row::{first_id, of_hash};
use super::{PgStore, Shared};
use crate::limits::{INDEX_CHECKED_AFTER, INDEX_SETTLED_AFTER, INDEX_STEP};
use crate::page_search::began_at;

/// How many bodies are read at once: at most 64 MiB with the default `max_body`.
const BODIES: usize = 64;

impl SearchIndex for PgStore {
    async fn index_values(
        &self,
        fields: Arc<SearchFields>,
        limit: usize,
    ) -> Result<bool, StoreError> {
        self.act(move |shared| async move { index(&shared, &fields, limit).await }).await
    }

    async fn count_events_with(&self, value: KeyHash, most: usize) -> Result<usize, StoreError> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let sql = "SELECT count(*) FROM (SELECT FROM hapax.search_value v WHERE v.hash = $1 \
                       ORDER BY v.event DESC LIMIT $2) found";
        let rows = ask(&self.shared, sql, &[&of_hash(value), &most]).await.map_err(read)?;
        let count: i64 = only(&rows).map_err(read)?.get(0);
        Ok(usize::try_from(count).unwrap_or_default())
    }
}

async fn index(shared: &Shared, fields: &SearchFields, limit: usize) -> Result<bool, PgError> {
    let (fingerprint, now) = (of_hash(fields.fingerprint()), shared.now());
    let sql = "SELECT through, checked, at FROM hapax.take_search_mark($1, $2)";
    let rows = ask(shared, sql, &[&fingerprint, &now]).await?;
    let row = only(&rows)?;
    let Some(through) = row.get::<_, Option<Uuid>>(0) else { return Ok(false) };
    let (checked, at): (Option<Uuid>, Timestamp) = (row.get(1), row.get(2));
    let sql = "SELECT w.id FROM hapax.body w ORDER BY w.id LIMIT 1";
    let oldest = ask(shared, sql, &[]).await?.first().map(|row| row.get::<_, Uuid>(0));
    let sources = fields.sources().map(ToString::to_string).collect();
    let walk = Walk { sources, oldest, limit: limit.min(INDEX_STEP) };

    let new = walk.next(shared, through, before(at, INDEX_SETTLED_AFTER)).await?;
    let settled = before(at, INDEX_CHECKED_AFTER);
    let mut again = walk.next(shared, checked.unwrap_or(settled), settled).await?;
    let ids: Vec<Uuid> = again.events.iter().map(|(id, _)| *id).collect();
    let sql = "SELECT n.id FROM unnest($1::uuid[]) n (id) \
               WHERE EXISTS (SELECT FROM hapax.search_value v WHERE v.event = n.id)";
    let known = ask(shared, sql, &[&ids]).await?;
    let known: Vec<Uuid> = known.iter().map(|row| row.get(0)).collect();
    again.events.retain(|(id, _)| !known.contains(id));

    let (mut events, mut hashes) = (Vec::new(), Vec::new());
    let all = [new.events, again.events].concat();
    for chunk in all.chunks(BODIES) {
        let ids: Vec<Uuid> = chunk.iter().map(|(id, _)| *id).collect();
        let sql = "SELECT b.id, b.body FROM hapax.body b WHERE b.id = ANY ($1)";
        for row in ask(shared, sql, &[&ids]).await? {
            let id: Uuid = row.get(0);
            let Some((_, source)) = chunk.iter().find(|(one, _)| *one == id) else { continue };
            for hash in fields.values_of(source, row.get(1)) {
                events.push(id);
                hashes.push(of_hash(hash));
            }
        }
    }
    if !events.is_empty() {
        failpoint!("search.values_read");
    }
    let (now_through, now_checked) = (new.through, Some(again.through));
    let sql = "SELECT hapax.index_values($1, $2, $3, $4, $5, $6, $7)";
    let moved: [&(dyn ToSql + Sync); 7] =
        [&fingerprint, &through, &now_through, &checked, &now_checked, &events, &hashes];
    let rows = ask(shared, sql, &moved).await?;
    if !events.is_empty() {
        failpoint!("search.mark_moved");
    }
    Ok(only(&rows)?.get::<_, bool>(0) && (new.more || again.more))
}

/// Runs one statement on a connection that never scans a table. Operators' lists use these connections too,
/// and wait for at most one statement.
async fn ask(
    shared: &Shared,
    sql: &str,
    values: &[&(dyn ToSql + Sync)],
) -> Result<Vec<Row>, PgError> {
    shared.pools.lists.checkout().await?.query(sql, values).await
}

/// The first id of the time that is `behind` earlier than `at`.
fn before(at: Timestamp, behind: SignedDuration) -> Uuid {
    first_id(at.checked_sub(behind).unwrap_or(Timestamp::MIN))
}

/// A walk over the events of the sources that configure fields.
struct Walk {
    sources: Vec<String>,
    /// The oldest event that is whole.
    oldest: Option<Uuid>,
    limit: usize,
}

/// One step of a walk.
struct WalkStep {
    events: Vec<(Uuid, SourceName)>,
    through: Uuid,
    more: bool,
}

impl Walk {
    /// The next events after `after`, before `end`.
    async fn next(&self, shared: &Shared, after: Uuid, end: Uuid) -> Result<WalkStep, PgError> {
        // A walk begins with the oldest whole event, as lists do.
        let oldest = self.oldest.map(|id| Uuid::from_u128(id.as_u128().saturating_sub(1)));
        let after = oldest.map_or(after, |oldest| oldest.max(after));
        let limit = i64::try_from(self.limit).unwrap_or(i64::MAX);
        let sql = "SELECT c.id, c.source FROM unnest($1::text[]) s (name) CROSS JOIN LATERAL ( \
                       SELECT e.id, e.source FROM hapax.event e \
                       WHERE e.source = s.name AND e.id > $2 AND e.id < $3 \
                       ORDER BY e.id LIMIT $4) c \
                   ORDER BY c.id LIMIT $4";
        let rows = ask(shared, sql, &[&self.sources, &after, &end, &limit]).await?;
        let events: Vec<(Uuid, SourceName)> =
            rows.iter().map(|row| (row.get(0), SourceName::new(row.get::<_, &str>(1)))).collect();
        let more = events.len() >= self.limit;
        let last = Uuid::from_u128(end.as_u128().saturating_sub(1));
        let through = match events.last() {
            Some((id, _)) if more => *id,
            Some(_) | None => after.max(last),
        };
        Ok(WalkStep { events, through, more })
    }
}

/// Returns the condition for an event `e` that matches a search exactly, and adds the values of the
/// condition.
pub(super) fn finds_exactly(asked: &mut Conditions, text: &TextSearch) -> String {
    let named: Vec<Uuid> = text.named.iter().map(|id| id.0).collect();
    let named = asked.bind(named);
    let values = asked.bind(hashes(text));
    format!(
        "(e.id = ANY ({named}) OR EXISTS (SELECT FROM hapax.search_value v \
          WHERE v.event = e.id AND v.hash = ANY ({values})))"
    )
}

/// The hashes that a search looks up.
pub(super) fn hashes(text: &TextSearch) -> Vec<Uuid> {
    text.values.iter().map(|hash| of_hash(*hash)).collect()
}

/// The events that arrived in a request with this id, or whose handlers published a message with
/// this id.
pub(super) async fn traced_by(shared: &Shared, id: &str) -> Result<Vec<EventId>, StoreError> {
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let most = i64::try_from(TRACED_EVENTS_MAX).unwrap_or(i64::MAX);
    let whole = "JOIN hapax.body b ON b.id = t.id";
    let sql = format!(
        "SELECT t.id FROM (SELECT m.event AS id FROM hapax.message m WHERE m.id = $1) t {whole} LIMIT $2"
    );
    let mut rows = client.query(&sql, &[&id, &most]).await.map_err(read)?;
    if let Ok(request) = id.parse::<Uuid>() {
        let sql = format!(
            "SELECT t.id FROM (SELECT a.event AS id FROM hapax.arrival a WHERE a.request_id = $1) t \
             {whole} LIMIT $2"
        );
        rows.extend(client.query(&sql, &[&request, &most]).await.map_err(read)?);
        if let Some(began) = began_at(request) {
            // The id contains the time at which the request began. Most requests take less than a
            // second, so that span is read first.
            let sql = format!(
                "SELECT t.id FROM (SELECT e.id FROM hapax.event e \
                     WHERE e.id >= $2 AND e.id < $3 AND e.request_id = $1 ORDER BY e.id LIMIT $4) t {whole}"
            );
            let after =
                |span: SignedDuration| first_id(began.checked_add(span).unwrap_or(Timestamp::MAX));
            let longest = SignedDuration::try_from(REQUEST_TIME_MAX).unwrap_or_default();
            let (mut from, ends) = (first_id(began), [SignedDuration::from_secs(1), longest]);
            for end in ends.map(after) {
                let found =
                    client.query(&sql, &[&request, &from, &end, &most]).await.map_err(read)?;
                from = end;
                if !found.is_empty() {
                    rows.extend(found);
                    break;
                }
            }
        }
    }
    let mut events: Vec<EventId> = rows.iter().map(|row| EventId(row.get(0))).collect();
    events.sort_unstable();
    events.dedup();
    events.truncate(TRACED_EVENTS_MAX);
    Ok(events)
}
