//! Queries of operators over sending: lists, newest first, and the backlog.

use bytes::Bytes;
use hapax_core::Tenant;
use hapax_core::delivery::{
    DeliveryId, DeliveryPhase, DeliveryStatus, ENDPOINT_DELETED, EndpointStanding, KEY_WAITS,
    MessageStatus,
};
use hapax_core::endpoint::{EndpointId, EndpointRecord};
use hapax_core::limits::LANE_COUNT_MAX;
use hapax_core::store::{
    ActionNote, Cursor, DeliveryAttempt, DeliveryBacklog, DeliveryDetail, DeliveryFilter,
    EndpointFilter, MessageDetail, MessageFilter, MessageNote, MessageSummary, Page,
};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};
use uuid::Uuid;

use super::endpoints;
use super::row::{MessageIdentity, message_and_endpoint, phase_of};
use crate::limits::{LIST_SORTED_MAX, PAGE_MAX};
use crate::page_search::PageSearch;
use crate::sqlite::lists::{Candidates, Checks, Numbered, below};
use crate::sqlite::row::{LANE_BITS, micros, timestamp};

/// The most messages with one id that are returned.
const NAMESAKES_MAX: i64 = 10;

/// The most attempts of one delivery that are returned, the newest.
const ATTEMPTS_MAX: i64 = 1_000;

/// Conditions of a query and their values, in the same order.
#[derive(Default)]
struct Conditions {
    sql: String,
    values: Vec<Value>,
}

impl Conditions {
    /// Adds a condition with one `?`.
    fn add(&mut self, condition: &str, value: Value) {
        self.values.push(value);
        self.add_fixed(&condition.replace('?', &format!("?{}", self.values.len())));
    }

    fn add_text(&mut self, condition: &str, text: Option<&str>) {
        if let Some(text) = text {
            self.add(condition, Value::Text(text.to_owned()));
        }
    }

    fn add_number(&mut self, condition: &str, number: Option<i64>) {
        if let Some(number) = number {
            self.add(condition, Value::Integer(number));
        }
    }

    fn add_fixed(&mut self, condition: &str) {
        self.sql.push_str(if self.sql.is_empty() { " WHERE " } else { " AND " });
        self.sql.push_str(condition);
    }
}

/// A page from rows. One row more than the page holds was read, if there is one.
fn page<T>(mut rows: Vec<(u128, T)>, limit: usize) -> Page<T> {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(|(at, _)| Cursor(*at));
    Page::new(rows.into_iter().map(|(_, item)| item).collect(), next)
}

fn count_at(row: &Row<'_>, at: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(at).map(i64::unsigned_abs)
}

fn optional_count(row: &Row<'_>, at: usize) -> rusqlite::Result<Option<u64>> {
    row.get::<_, Option<i64>>(at).map(|count| count.map(i64::unsigned_abs))
}

fn number(cursor: Cursor) -> i64 {
    i64::try_from(cursor.0).unwrap_or(i64::MAX)
}

pub(super) fn endpoints(
    conn: &Connection,
    filter: &EndpointFilter,
) -> rusqlite::Result<Page<EndpointRecord>> {
    let mut conditions = Conditions::default();
    conditions.add_fixed("deleted_at IS NULL");
    let index = match filter.failing {
        true => {
            conditions.add_fixed("failing IS NOT NULL");
            conditions.add_fixed("disabled_at IS NULL");
            " INDEXED BY hapax_endpoint_failing"
        }
        false => "",
    };
    conditions.add_text("tenant = ?", filter.tenant.as_ref().map(Tenant::as_str));
    conditions.add_number("endpoint < ?", filter.before.map(number));
    let limit = filter.limit.clamp(1, PAGE_MAX);
    let sql = format!(
        "SELECT {} FROM hapax_endpoint{index}{} ORDER BY endpoint DESC LIMIT {}",
        endpoints::COLUMNS,
        conditions.sql,
        limit + 1,
    );
    let rows: Vec<(u128, EndpointRecord)> = conn
        .prepare_cached(&sql)?
        .query_map(params_from_iter(conditions.values), |row| {
            let (number, record) = endpoints::read(row)?;
            Ok((number.unsigned_abs().into(), record))
        })?
        .collect::<rusqlite::Result<_>>()?;
    Ok(page(rows, limit))
}

pub(super) fn endpoint(
    conn: &Connection,
    id: EndpointId,
) -> rusqlite::Result<Option<EndpointRecord>> {
    let sql = format!(
        "SELECT {} FROM hapax_endpoint WHERE id = ?1 AND deleted_at IS NULL",
        endpoints::COLUMNS
    );
    let found = conn.prepare_cached(&sql)?.query_row([id.0.as_bytes()], endpoints::read);
    Ok(found.optional()?.map(|(_, record)| record))
}

/// The place of a message's status in the order of [`DeliveryStatus`]; NULL without a delivery.
const RANK: &str = "(SELECT min(CASE d.state WHEN 3 THEN 0 WHEN 1 THEN 4 WHEN 2 THEN 6 WHEN 4 THEN 7 \
     ELSE CASE WHEN e.deleted_at IS NOT NULL THEN 7 WHEN e.disabled_at IS NOT NULL OR e.failing IS NOT NULL THEN 2 \
               WHEN d.state = 5 /* parked */ THEN 3 WHEN d.steps > 0 THEN 1 ELSE 5 END END) \
     FROM hapax_delivery d JOIN hapax_endpoint e ON e.endpoint = d.endpoint \
     WHERE d.message_seq = m.seq)";

/// The statuses in the order of [`RANK`].
const RANKED: [DeliveryStatus; 8] = [
    DeliveryStatus::Dead,
    DeliveryStatus::Failed,
    DeliveryStatus::Held,
    DeliveryStatus::Parked,
    DeliveryStatus::Sending,
    DeliveryStatus::Waiting,
    DeliveryStatus::Delivered,
    DeliveryStatus::Cancelled,
];

fn summary_sql() -> String {
    format!(
        "SELECT m.seq, m.id, m.tenant, m.type, m.key, m.api_version, m.created_at, m.deliveries, {RANK} \
         FROM hapax_message m"
    )
}

fn summary(row: &Row<'_>) -> rusqlite::Result<(i64, MessageSummary)> {
    let seq: i64 = row.get(0)?;
    let key: Option<String> = row.get(4)?;
    let rank: Option<u8> = row.get(8)?;
    let summary = MessageSummary {
        id: row.get(1)?,
        tenant: row.get(2)?,
        r#type: row.get(3)?,
        sequence: key.is_some().then_some(seq.unsigned_abs()),
        key,
        api_version: row.get(5)?,
        created_at: timestamp(row.get(6)?),
        status: MessageStatus(rank.and_then(|rank| RANKED.get(usize::from(rank)).copied())),
        deliveries: count_at(row, 7)?,
    };
    Ok((seq, summary))
}

pub(super) fn messages(
    conn: &Connection,
    filter: &MessageFilter,
) -> rusqlite::Result<Page<MessageSummary>> {
    let mut search = PageSearch::begin(filter.limit, filter.bound);
    let mut checks = Checks::default();
    let compared = [
        ("m.tenant =", filter.tenant.as_ref().map(|tenant| text(tenant.as_str()))),
        ("m.type =", filter.message_type.as_deref().map(text)),
        ("m.key =", filter.key.as_deref().map(text)),
        ("m.created_at >=", filter.since.map(|at| Value::Integer(micros(at)))),
        ("m.created_at <", filter.until.map(|at| Value::Integer(micros(at)))),
    ];
    for (comparison, value) in compared {
        if let Some(value) = value {
            let value = checks.bind(value);
            checks.require(format!("{comparison} {value}"));
        }
    }
    if let Some(MessageStatus(status)) = filter.status {
        checks.require(
            match status.and_then(|status| RANKED.iter().position(|one| *one == status)) {
                Some(rank) => format!("{RANK} = {rank}"),
                None => format!("{RANK} IS NULL"),
            },
        );
    }
    // A message without its bytes is not listed: only its id is still known.
    checks.require("EXISTS (SELECT 1 FROM hapax_message_body b WHERE b.seq = m.seq)");
    let snapshot = conn.unchecked_transaction()?;
    let range = Numbered::Messages.range(&snapshot, filter.since, filter.until)?;
    let candidates = message_candidates(&snapshot, filter)?;
    let range = below(range, filter.before);
    let table = ("hapax_message", "m", "created_at");
    checks.search(&snapshot, table, candidates, range, &mut search)?;
    let page = search.page();
    let mut one = snapshot.prepare_cached(&format!("{} WHERE m.seq = ?1", summary_sql()))?;
    let mut items = Vec::with_capacity(page.items.len());
    for seq in page.items {
        items.extend(one.query_row([seq], summary).optional()?.map(|(_, summary)| summary));
    }
    Ok(Page { items, next: page.next, searched_to: page.searched_to })
}

/// The messages that may match, by the states of their deliveries.
fn message_candidates(conn: &Connection, filter: &MessageFilter) -> rusqlite::Result<Candidates> {
    let of = |deliveries: &str| {
        format!("SELECT message_seq FROM {deliveries} AND message_seq < ?1 AND message_seq >= ?2")
    };
    if let Some(key) = &filter.key {
        let sql = "SELECT seq FROM hapax_message INDEXED BY hapax_message_key
                   WHERE key = ?3 AND seq < ?1 AND seq >= ?2 ORDER BY seq DESC";
        return Ok(Candidates::Numbers { sql: sql.to_owned(), value: Some(text(key)) });
    }
    let Some(MessageStatus(Some(status))) = filter.status else { return Ok(Candidates::All) };
    let indexed = indexed(status);
    Ok(match status {
        DeliveryStatus::Dead | DeliveryStatus::Failed => {
            Candidates::any(&indexed.iter().map(|from| of(from)).collect::<Vec<_>>())
        }
        DeliveryStatus::Sending
        | DeliveryStatus::Parked
        | DeliveryStatus::Held
        | DeliveryStatus::Waiting
            if are_few(conn, indexed)? =>
        {
            Candidates::any(&indexed.iter().map(|from| of(from)).collect::<Vec<_>>())
        }
        DeliveryStatus::Sending
        | DeliveryStatus::Parked
        | DeliveryStatus::Held
        | DeliveryStatus::Waiting
        | DeliveryStatus::Delivered
        | DeliveryStatus::Cancelled => Candidates::All,
    })
}

/// The deliveries that may have a status, with the indexes to read them by; none if the status is frequent.
fn indexed(status: DeliveryStatus) -> &'static [&'static str] {
    const READY: &str =
        "hapax_delivery d INDEXED BY hapax_delivery_ready WHERE d.state = 0 /* ready */";
    const PARKED: &str =
        "hapax_delivery d INDEXED BY hapax_delivery_parked WHERE d.state = 5 /* parked */";
    match status {
        DeliveryStatus::Dead => {
            &["hapax_delivery d INDEXED BY hapax_delivery_dead WHERE d.state = 3 /* dead */"]
        }
        DeliveryStatus::Failed => &["hapax_delivery d INDEXED BY hapax_delivery_failed
               WHERE d.state = 0 /* ready */ AND d.steps > 0"],
        DeliveryStatus::Sending => {
            &["hapax_delivery d INDEXED BY hapax_delivery_leased WHERE d.state = 1 /* leased */"]
        }
        DeliveryStatus::Parked => &[PARKED],
        DeliveryStatus::Waiting => &[READY],
        DeliveryStatus::Held => &[READY, PARKED],
        DeliveryStatus::Delivered | DeliveryStatus::Cancelled => &[],
    }
}

/// Whether there are so few of these deliveries that all of them can be sorted for a page.
fn are_few(conn: &Connection, indexed: &[&str]) -> rusqlite::Result<bool> {
    let mut left = LIST_SORTED_MAX;
    for from in indexed {
        let sql = format!("SELECT count(*) FROM (SELECT 1 FROM {from} LIMIT ?1)");
        let count: i64 =
            conn.prepare_cached(&sql)?.query_row([left as i64 + 1], |row| row.get(0))?;
        let Some(rest) = left.checked_sub(count as usize) else { return Ok(false) };
        left = rest;
    }
    Ok(!indexed.is_empty())
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

pub(super) fn message(
    conn: &Connection,
    id: &str,
    tenant: Option<&Tenant>,
) -> rusqlite::Result<Vec<MessageDetail>> {
    let mut conditions = Conditions::default();
    conditions.add_text("m.id = ?", Some(id));
    conditions.add_text("m.tenant = ?", tenant.map(Tenant::as_str));
    let sql =
        format!("{}{} ORDER BY m.seq DESC LIMIT {NAMESAKES_MAX}", summary_sql(), conditions.sql);
    let found: Vec<(i64, MessageSummary)> = conn
        .prepare_cached(&sql)?
        .query_map(params_from_iter(conditions.values), summary)?
        .collect::<rusqlite::Result<_>>()?;
    found
        .into_iter()
        .map(|(seq, summary)| {
            let body: Option<Vec<u8>> = conn
                .prepare_cached("SELECT body FROM hapax_message_body WHERE seq = ?1")?
                .query_row([seq], |row| row.get(0))
                .optional()?;
            let mut of_it = Conditions::default();
            of_it.add_number("d.message_seq = ?", Some(seq));
            let deliveries = read_deliveries(conn, of_it, "d.endpoint")?;
            Ok(MessageDetail {
                summary,
                body: Bytes::from(body.unwrap_or_default()),
                deliveries: deliveries.into_iter().map(|(_, delivery)| delivery).collect(),
            })
        })
        .collect()
}

/// A message as it is shown with the event whose handler published it.
pub(in crate::sqlite) fn message_note(
    conn: &Connection,
    seq: i64,
) -> rusqlite::Result<MessageNote> {
    let sql = format!("{} WHERE m.seq = ?1", summary_sql());
    let (_, summary) = conn.prepare_cached(&sql)?.query_row([seq], summary)?;
    let MessageSummary { id, tenant, r#type, created_at, status, .. } = summary;
    Ok(MessageNote { id, tenant, r#type, created_at, status })
}

const DETAIL: &str = "SELECT d.message_seq, d.endpoint, d.state, d.steps, d.attempt, d.due_at, d.started_at, \
     d.node, d.error, d.took_ms, d.answer_status, d.answer, m.id, m.type, m.key, m.tenant, m.created_at, \
     m.fingerprint, e.id, json_extract(e.settings, '$.url'), e.disabled_at, \
     coalesce(e.disabled_reason, e.failing), e.deleted_at, e.failing IS NOT NULL";

pub(super) fn deliveries(
    conn: &Connection,
    filter: &DeliveryFilter,
) -> rusqlite::Result<Page<DeliveryDetail>> {
    let mut search = PageSearch::begin(filter.limit, filter.bound);
    let snapshot = conn.unchecked_transaction()?;
    let (sql, values) = delivery_statement(&snapshot, filter)?;
    // Row by row, so that the list can stop at its bound, whatever the filter drops.
    let mut statement = snapshot.prepare_cached(&sql)?;
    let mut rows = statement.query(params_from_iter(values))?;
    while let Some(row) = rows.next()? {
        let (place, delivery) = detail(row)?;
        let cursor = Cursor(
            u128::from(place.0.unsigned_abs()) << LANE_BITS | u128::from(place.1.unsigned_abs()),
        );
        let item = fits(filter, &delivery).then_some(place);
        let time = delivery.created_at;
        if search.take(cursor, time, item.map(|place| (place, delivery))).is_break() {
            break;
        }
    }
    drop(rows);
    let mut page = search.page();
    for (place, delivery) in &mut page.items {
        add_story(&snapshot, *place, delivery)?;
    }
    Ok(page.map(|(_, delivery)| delivery))
}

/// The statement that reads the rows of a list of deliveries, from new to old, and its values.
pub(in crate::sqlite) fn delivery_statement(
    conn: &Connection,
    filter: &DeliveryFilter,
) -> rusqlite::Result<(String, Vec<Value>)> {
    let mut conditions = Conditions::default();
    let range = Numbered::Messages.range(conn, filter.since, filter.until)?;
    // A delivery is named by message and endpoint; the cursor holds both.
    let before = filter.before.map_or(u128::MAX, |Cursor(before)| before);
    let before_seq = i64::try_from(before >> LANE_BITS).unwrap_or(i64::MAX);
    let before_endpoint = (before & ((1 << LANE_BITS) - 1)) as i64;
    let (seq, endpoint) = match before_seq < range.end {
        true => (before_seq, before_endpoint),
        false => (range.end, 0),
    };
    let from = delivery_rows(conn, filter, &mut conditions)?;
    conditions.add_number("d.message_seq >= ?", Some(range.start));
    conditions.add_number(&format!("(d.message_seq, d.endpoint) < (?, {endpoint})"), Some(seq));
    let sql = format!(
        "{DETAIL} FROM {from}{} ORDER BY d.message_seq DESC, d.endpoint DESC",
        conditions.sql
    );
    Ok((sql, conditions.values))
}

/// The tables of a list of deliveries: the first is read from new to old, by an index over the rows in
/// question where one exists.
fn delivery_rows(
    conn: &Connection,
    filter: &DeliveryFilter,
    conditions: &mut Conditions,
) -> rusqlite::Result<String> {
    let endpoints = "CROSS JOIN hapax_endpoint e ON e.endpoint = d.endpoint";
    let of_message = |index: &str| {
        format!(
            "hapax_message m{index} CROSS JOIN hapax_delivery d ON d.message_seq = m.seq {endpoints}"
        )
    };
    if let Some(message) = &filter.message {
        conditions.add_text("m.id = ?", Some(message));
        return Ok(of_message(""));
    }
    if let Some(key) = &filter.key {
        conditions.add_text("m.key = ?", Some(key));
        return Ok(of_message(" INDEXED BY hapax_message_key"));
    }
    let messages = format!("CROSS JOIN hapax_message m ON m.seq = d.message_seq {endpoints}");
    if let Some(status) = filter.status {
        let indexed = indexed(status);
        // The indexes of these two statuses are in the order of the list.
        let is_sorted = matches!(status, DeliveryStatus::Dead | DeliveryStatus::Failed);
        if is_sorted || (filter.endpoint.is_none() && are_few(conn, indexed)?) {
            let rows: Vec<_> =
                indexed.iter().map(|from| format!("SELECT d.* FROM {from}")).collect();
            return Ok(format!("({}) d {messages}", rows.join(" UNION ALL ")));
        }
    }
    if let Some(id) = filter.endpoint {
        let id = Value::Blob(id.0.as_bytes().to_vec());
        conditions.add("d.endpoint = (SELECT endpoint FROM hapax_endpoint WHERE id = ?)", id);
        return Ok(format!("hapax_delivery d INDEXED BY hapax_delivery_to {messages}"));
    }
    Ok(format!("hapax_delivery d {messages}"))
}

/// The conditions of a filter for which there is no index.
fn fits(filter: &DeliveryFilter, delivery: &DeliveryDetail) -> bool {
    filter.tenant.as_ref().is_none_or(|tenant| delivery.tenant == tenant.as_str())
        && filter.endpoint.is_none_or(|endpoint| delivery.endpoint == endpoint)
        && (filter.key.is_none() || filter.key == delivery.key)
        && filter.status.is_none_or(|status| delivery.status == status)
        && filter.since.is_none_or(|since| delivery.created_at >= since)
        && filter.until.is_none_or(|until| delivery.created_at < until)
}

pub(super) fn delivery(
    conn: &Connection,
    id: DeliveryId,
) -> rusqlite::Result<Option<DeliveryDetail>> {
    if MessageIdentity::find(conn, id)?.is_none() {
        return Ok(None);
    }
    let (seq, endpoint) = message_and_endpoint(id);
    let mut conditions = Conditions::default();
    conditions.add_number("d.message_seq = ?", Some(seq));
    conditions.add_number("d.endpoint = ?", Some(endpoint));
    Ok(read_deliveries(conn, conditions, "1")?.pop().map(|(_, delivery)| delivery))
}

/// Deliveries with their attempts, and the row of each.
fn read_deliveries(
    conn: &Connection,
    conditions: Conditions,
    order: &str,
) -> rusqlite::Result<Vec<((i64, i64), DeliveryDetail)>> {
    let sql = format!(
        "{DETAIL} FROM hapax_delivery d JOIN hapax_message m ON m.seq = d.message_seq
         JOIN hapax_endpoint e ON e.endpoint = d.endpoint{} ORDER BY {order}",
        conditions.sql
    );
    let mut deliveries: Vec<((i64, i64), DeliveryDetail)> = conn
        .prepare_cached(&sql)?
        .query_map(params_from_iter(conditions.values), detail)?
        .collect::<rusqlite::Result<_>>()?;
    for (place, delivery) in &mut deliveries {
        add_story(conn, *place, delivery)?;
    }
    Ok(deliveries)
}

/// Reads the attempts of a delivery, and the acts of operators on it.
fn add_story(
    conn: &Connection,
    (seq, endpoint): (i64, i64),
    delivery: &mut DeliveryDetail,
) -> rusqlite::Result<()> {
    let mut attempts = attempts(conn, seq, endpoint)?;
    // The attempt that delivered is in the delivery's row, and is the last.
    attempts.append(&mut delivery.attempts);
    delivery.attempts = attempts;
    delivery.actions = actions(conn, seq, endpoint)?;
    Ok(())
}

fn detail(row: &Row<'_>) -> rusqlite::Result<((i64, i64), DeliveryDetail)> {
    let (seq, endpoint): (i64, i64) = (row.get(0)?, row.get(1)?);
    let phase = phase_of(row.get(2)?);
    let due_at = timestamp(row.get(5)?);
    let disabled_at: Option<i64> = row.get(20)?;
    let deleted_at: Option<i64> = row.get(22)?;
    let standing = match (deleted_at, disabled_at, row.get(23)?) {
        (Some(_), _, _) => EndpointStanding::Deleted,
        (None, Some(_), _) => EndpointStanding::Disabled,
        (None, None, true) => EndpointStanding::Failing,
        (None, None, false) => EndpointStanding::Active,
    };
    let status = DeliveryStatus::of(phase, row.get(3)?, standing);
    let error: Option<String> = row.get(8)?;
    let reason = match status {
        DeliveryStatus::Held => row.get(21)?,
        DeliveryStatus::Parked => Some(KEY_WAITS.to_owned()),
        DeliveryStatus::Cancelled if phase.is_open() => Some(ENDPOINT_DELETED.to_owned()),
        DeliveryStatus::Delivered => None,
        DeliveryStatus::Dead
        | DeliveryStatus::Failed
        | DeliveryStatus::Sending
        | DeliveryStatus::Waiting
        | DeliveryStatus::Cancelled => error,
    };
    let created_at: i64 = row.get(16)?;
    let named = MessageIdentity { seq, created_at, fingerprint: row.get(17)? };
    let mut attempts = Vec::new();
    if phase == DeliveryPhase::Delivered {
        let started_at: Option<i64> = row.get(6)?;
        attempts.push(DeliveryAttempt {
            n: row.get(4)?,
            at: started_at.map_or(due_at, timestamp),
            took_ms: optional_count(row, 9)?,
            status: row.get(10)?,
            error: None,
            answer: row.get(11)?,
            node: row.get::<_, Option<String>>(7)?.unwrap_or_default(),
        });
    }
    let detail = DeliveryDetail {
        id: named.delivery(endpoint),
        message: row.get(12)?,
        message_type: row.get(13)?,
        key: row.get(14)?,
        tenant: row.get(15)?,
        endpoint: EndpointId(Uuid::from_bytes(row.get(18)?)),
        url: row.get(19)?,
        status,
        reason,
        attempt: row.get(4)?,
        created_at: timestamp(created_at),
        // A parked delivery has no time of its own.
        due_at: (phase.is_open() && phase != DeliveryPhase::Parked).then_some(due_at),
        finished_at: (!phase.is_open()).then_some(due_at),
        attempts,
        actions: Vec::new(),
    };
    Ok(((seq, endpoint), detail))
}

fn attempts(conn: &Connection, seq: i64, endpoint: i64) -> rusqlite::Result<Vec<DeliveryAttempt>> {
    let mut attempts: Vec<DeliveryAttempt> = conn
        .prepare_cached(
            "SELECT attempt, started_at, took_ms, answer_status, error, answer, node
             FROM hapax_delivery_attempt WHERE message_seq = ?1 AND endpoint = ?2
             ORDER BY attempt DESC LIMIT ?3",
        )?
        .query_map((seq, endpoint, ATTEMPTS_MAX), |row| {
            Ok(DeliveryAttempt {
                n: row.get(0)?,
                at: timestamp(row.get(1)?),
                took_ms: optional_count(row, 2)?,
                status: row.get(3)?,
                error: row.get(4)?,
                answer: row.get(5)?,
                node: row.get(6)?,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    attempts.reverse();
    Ok(attempts)
}

/// The actions of operators on a delivery, and on all deliveries of its message.
fn actions(conn: &Connection, seq: i64, endpoint: i64) -> rusqlite::Result<Vec<ActionNote>> {
    conn.prepare_cached(
        "SELECT what, who, reason, at FROM hapax_sending_action
         WHERE message_seq = ?1 AND (endpoint = ?2 OR endpoint IS NULL) ORDER BY action LIMIT ?3",
    )?
    .query_map((seq, endpoint, ATTEMPTS_MAX), |row| {
        let (action, who, reason) = (row.get(0)?, row.get(1)?, row.get(2)?);
        Ok(ActionNote { action, who, reason, at: timestamp(row.get(3)?) })
    })?
    .collect()
}

/// The backlog. Every count stops early, and goes from endpoints to their deliveries, so that a long
/// backlog of disabled endpoints does not slow down the count of the others.
pub(super) fn backlog(conn: &Connection) -> rusqlite::Result<DeliveryBacklog> {
    let count = |from: &str| -> rusqlite::Result<u64> {
        conn.prepare_cached(&format!(
            "SELECT count(*) FROM (SELECT 1 FROM {from} LIMIT {LANE_COUNT_MAX})"
        ))?
        .query_row([], |row| count_at(row, 0))
    };
    let ready =
        "CROSS JOIN hapax_delivery d ON d.endpoint = e.endpoint AND d.state = 0 /* ready */";
    let parked =
        "CROSS JOIN hapax_delivery d ON d.endpoint = e.endpoint AND d.state = 5 /* parked */";
    let active = "WHERE e.disabled_at IS NULL AND e.failing IS NULL AND e.deleted_at IS NULL";
    let disabled =
        "WHERE (e.disabled_at IS NOT NULL OR e.failing IS NOT NULL) AND e.deleted_at IS NULL";
    let oldest_due: Option<i64> = conn
        .prepare_cached(&format!(
            "SELECT min(due_at) FROM (
                 SELECT (SELECT min(d.due_at) FROM hapax_delivery d
                         WHERE d.endpoint = e.endpoint AND d.state = 0 /* ready */) AS due_at
                 FROM hapax_endpoint e {active}
                 UNION ALL
                 SELECT (SELECT min(d.due_at) FROM hapax_delivery d
                         WHERE d.endpoint = e.endpoint AND d.state = 1 /* leased */)
                 FROM hapax_endpoint e {active})"
        ))?
        .query_row([], |row| row.get(0))?;
    Ok(DeliveryBacklog {
        waiting: count(&format!("hapax_endpoint e {ready} {active}"))?,
        sending: count(
            "hapax_delivery INDEXED BY hapax_delivery_leased WHERE state = 1 /* leased */",
        )?,
        held: (count(&format!("hapax_endpoint e {ready} {disabled}"))?
            + count(&format!("hapax_endpoint e {parked} {disabled}"))?)
        .min(LANE_COUNT_MAX),
        parked: count(&format!("hapax_endpoint e {parked} {active}"))?,
        dead: count("hapax_delivery INDEXED BY hapax_delivery_dead WHERE state = 3 /* dead */")?,
        oldest_due: oldest_due.map(timestamp),
    })
}
