//! Queries of operators over sending: lists, newest first, and the backlog. None waits for a writer.

use bytes::Bytes;
use hapax_core::delivery::{
    DeliveryId, DeliveryPhase, DeliveryStatus, EndpointStanding, KEY_WAITS, MessageStatus,
};
use hapax_core::endpoint::{EndpointId, EndpointRecord};
use hapax_core::limits::LANE_COUNT_MAX;
use hapax_core::store::{
    ActionNote, Cursor, DeliveryAttempt, DeliveryBacklog, DeliveryDetail, DeliveryFilter,
    EndpointFilter, MessageDetail, MessageFilter, MessageSummary, Page, ReadBound, StoreError,
};
use hapax_core::{Tenant, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::row::{RECORD, message_and_endpoint, phase_of, record, settings};
use crate::limits::{LIST_ROWS_READ_MAX, MESSAGE_TIME_SLACK, PAGE_MAX};
use crate::postgres::Shared;
use crate::postgres::connect::{PgError, PooledClient};
use crate::postgres::jobs::only;
use crate::postgres::lists::{SlicedPage, Slices};
use crate::postgres::reader::{Conditions, read};
use crate::postgres::row::text;

/// The most messages that one id finds.
const MESSAGES_OF_ONE_ID_MAX: usize = 10;

/// The bits of an endpoint's number in the cursor over deliveries.
const ENDPOINT_BITS: u32 = 24;

/// The reason of an open delivery whose endpoint was deleted; `hapax.cancel_orphans` writes the same.
const ENDPOINT_DELETED: &str = "its endpoint was deleted";

/// A message with its status over all deliveries.
const SUMMARY: &str = "SELECT m.message, m.id, m.tenant, m.type, m.key, m.api_version, m.created_at, m.deliveries, \
     s.rank \
     FROM hapax.message m CROSS JOIN LATERAL ( \
         SELECT min(hapax.delivery_rank(d.state, d.steps, \
             e.disabled_at IS NOT NULL OR e.failing IS NOT NULL, e.deleted_at IS NOT NULL)) AS rank \
         FROM hapax.delivery d JOIN hapax.endpoint e ON e.endpoint = d.endpoint \
         WHERE d.message = m.message) s";

/// A delivery with its message and endpoint.
const DETAIL: &str = "SELECT d.message, d.endpoint, d.state, d.steps, d.attempt, d.due_at, d.started_at, d.node, \
     d.error, d.took_ms, d.answer_status, d.answer, m.id, m.type, m.key, m.tenant, m.created_at, \
     hapax.delivery_id(m.created_at, m.fingerprint, d.message, d.endpoint), e.id, e.settings, \
     e.disabled_at IS NOT NULL, coalesce(e.disabled_reason, e.failing), e.deleted_at IS NOT NULL, \
     e.failing IS NOT NULL";

/// All rows, without the bound on the rows that a list may read.
const ALL_DELIVERIES: &str = "hapax.delivery";

/// The statuses in the order of `hapax.delivery_rank`.
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

/// A page of rows. `rows` has one row more than the page holds if there is a next page.
fn page<T>(mut rows: Vec<(u128, T)>, limit: usize) -> Page<T> {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(|(at, _)| Cursor(*at));
    Page::new(rows.into_iter().map(|(_, item)| item).collect(), next)
}

pub(super) async fn endpoints(
    shared: &Shared,
    filter: EndpointFilter,
) -> Result<Page<EndpointRecord>, StoreError> {
    let mut asked = Conditions::default();
    asked.require("e.deleted_at IS NULL");
    if filter.failing {
        asked.require("e.failing IS NOT NULL AND e.disabled_at IS NULL");
    }
    if let Some(tenant) = &filter.tenant {
        asked.add("e.tenant = ?", text(tenant.as_str()));
    }
    if let Some(Cursor(before)) = filter.before {
        asked.add("e.endpoint < ?", i32::try_from(before).unwrap_or(i32::MAX));
    }
    let limit = filter.limit.clamp(1, PAGE_MAX);
    let head = format!("SELECT {RECORD} FROM hapax.endpoint e");
    let tail = format!("ORDER BY e.endpoint DESC LIMIT {}", limit + 1);
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let rows = asked.query(&mut client, &head, &tail).await.map_err(read)?;
    let number = |row: &Row| u128::from(row.get::<_, i32>(9).unsigned_abs());
    Ok(page(rows.iter().filter_map(|row| Some((number(row), record(row, 0)?))).collect(), limit))
}

pub(super) async fn endpoint(
    shared: &Shared,
    id: EndpointId,
) -> Result<Option<EndpointRecord>, StoreError> {
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let sql =
        format!("SELECT {RECORD} FROM hapax.endpoint e WHERE e.id = $1 AND e.deleted_at IS NULL");
    let rows = client.query(&sql, &[&id.0]).await.map_err(read)?;
    Ok(rows.first().and_then(|row| record(row, 0)))
}

pub(super) async fn messages(
    shared: &Shared,
    filter: MessageFilter,
) -> Result<Page<MessageSummary>, StoreError> {
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let mut page = SlicedPage::begin(filter.limit);
    let mut slices = Slices::begin(filter.bound);
    let (low, mut before) = message_range(&mut client, filter.since, filter.until).await?;
    if let Some(Cursor(cursor)) = filter.before {
        before = before.min(i64::try_from(cursor).unwrap_or(i64::MAX));
    }
    loop {
        let rows = slices.next();
        let found = message_slice(&mut client, &filter, (low, before), rows).await?;
        let is_last = (found.len() as i64) < rows;
        let Some(last) = found.last().copied() else { return Ok(page.page(None)) };
        let count = found.len();
        let mut asked = Conditions::default();
        asked.add("m.message = ANY (?)", found);
        message_conditions(&mut asked, &filter);
        let tail = format!("ORDER BY m.message DESC LIMIT {}", page.wanted());
        let found = asked.query(&mut client, SUMMARY, &tail).await.map_err(read)?;
        let number = |row: &Row| Cursor(row.get::<_, i64>(0).unsigned_abs().into());
        if page.add(found.iter().map(|row| (number(row), summary(row)))) || is_last {
            return Ok(page.page(None));
        }
        before = last;
        if !slices.read(count) {
            let sql = "SELECT m.created_at FROM hapax.message m WHERE m.message = $1";
            let times = client.query(sql, &[&last]).await.map_err(read)?;
            let time = times.first().map_or(Timestamp::MIN, |row| row.get(0));
            let at = Cursor(last.unsigned_abs().into());
            return Ok(page.page(Some((at, time))));
        }
    }
}

/// The range of numbers that messages of a span of time may have. The range includes its start and excludes
/// its end.
async fn message_range(
    client: &mut PooledClient,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
) -> Result<(i64, i64), StoreError> {
    let number = |rows: Vec<Row>| rows.first().map(|row| row.get::<_, i64>(0));
    let mut range = (0, i64::MAX);
    if let Some(since) = since.and_then(|since| since.checked_sub(MESSAGE_TIME_SLACK).ok()) {
        let sql = "SELECT m.message FROM hapax.message m WHERE m.created_at < $1 \
                   ORDER BY m.created_at DESC LIMIT 1";
        range.0 = number(client.query(sql, &[&since]).await.map_err(read)?).unwrap_or(range.0);
    }
    if let Some(until) = until.and_then(|until| until.checked_add(MESSAGE_TIME_SLACK).ok()) {
        let sql = "SELECT m.message FROM hapax.message m WHERE m.created_at >= $1 \
                   ORDER BY m.created_at LIMIT 1";
        range.1 = number(client.query(sql, &[&until]).await.map_err(read)?).unwrap_or(range.1);
    }
    Ok(range)
}

/// The next messages that may match, from new to old.
async fn message_slice(
    client: &mut PooledClient,
    filter: &MessageFilter,
    (low, before): (i64, i64),
    rows: i64,
) -> Result<Vec<i64>, StoreError> {
    if let Some(key) = &filter.key {
        let sql = "SELECT m.message FROM hapax.message m WHERE m.key = $4 AND m.message < $1 \
                   AND m.message >= $2 ORDER BY m.message DESC LIMIT $3";
        let found = client.query(sql, &[&before, &low, &rows, &text(key)]).await.map_err(read)?;
        return Ok(found.iter().map(|row| row.get(0)).collect());
    }
    let among = match filter.status {
        Some(MessageStatus(Some(DeliveryStatus::Dead))) => {
            Some("d.state = hapax.delivery_state('dead')")
        }
        Some(MessageStatus(Some(DeliveryStatus::Failed))) => {
            Some("d.state = hapax.delivery_state('ready') AND d.steps > 0")
        }
        Some(MessageStatus(
            None
            | Some(
                DeliveryStatus::Sending
                | DeliveryStatus::Parked
                | DeliveryStatus::Held
                | DeliveryStatus::Waiting
                | DeliveryStatus::Delivered
                | DeliveryStatus::Cancelled,
            ),
        ))
        | None => None,
    };
    let sql = match among {
        Some(among) => format!(
            "SELECT d.message FROM hapax.delivery d WHERE {among} AND d.message < $1 \
             AND d.message >= $2 ORDER BY d.message DESC LIMIT $3"
        ),
        None => {
            "SELECT m.message FROM hapax.message m WHERE m.body IS NOT NULL AND m.message < $1 \
                 AND m.message >= $2 ORDER BY m.message DESC LIMIT $3"
                .to_owned()
        }
    };
    let found = client.query(&sql, &[&before, &low, &rows]).await.map_err(read)?;
    Ok(found.iter().map(|row| row.get(0)).collect())
}

/// Adds all conditions of a filter. The rows are known already: expressions keep the indexes of keys and times out of
/// the plan.
fn message_conditions(asked: &mut Conditions, filter: &MessageFilter) {
    // A message without its bytes is pruned: only its id is known.
    asked.require("m.body IS NOT NULL");
    if let Some(tenant) = &filter.tenant {
        asked.add("m.tenant = ?", text(tenant.as_str()));
    }
    if let Some(kind) = &filter.message_type {
        asked.add("m.type = ?", text(kind));
    }
    if let Some(key) = &filter.key {
        asked.add("m.key || '' = ?", text(key));
    }
    if let Some(since) = filter.since {
        asked.add("m.created_at + interval '0' >= ?", since);
    }
    if let Some(until) = filter.until {
        asked.add("m.created_at + interval '0' < ?", until);
    }
    if let Some(MessageStatus(status)) = filter.status {
        let rank = status.and_then(|status| RANKED.iter().position(|one| *one == status));
        asked.require(match rank {
            Some(rank) => format!("s.rank = {rank}"),
            None => "m.deliveries = 0 AND s.rank IS NULL".to_owned(),
        });
    }
}

fn summary(row: &Row) -> MessageSummary {
    let number: i64 = row.get(0);
    let key: Option<String> = row.get(4);
    MessageSummary {
        id: row.get(1),
        tenant: row.get(2),
        r#type: row.get(3),
        sequence: key.is_some().then_some(number.unsigned_abs()),
        key,
        api_version: row.get(5),
        created_at: row.get(6),
        status: ranked(row.get(8)),
        deliveries: u64::try_from(row.get::<_, i32>(7)).unwrap_or(0),
    }
}

/// The status of a message from `hapax.delivery_rank` of its most urgent delivery.
pub(in crate::postgres) fn ranked(rank: Option<i32>) -> MessageStatus {
    let rank = rank.and_then(|rank| usize::try_from(rank).ok());
    MessageStatus(rank.and_then(|rank| RANKED.get(rank).copied()))
}

pub(super) async fn message(
    shared: &Shared,
    id: &str,
    tenant: Option<Tenant>,
) -> Result<Vec<MessageDetail>, StoreError> {
    let mut asked = Conditions::default();
    asked.add("m.id = ?", text(id));
    if let Some(tenant) = &tenant {
        asked.add("m.tenant = ?", text(tenant.as_str()));
    }
    // The order is an expression, so that the index of ids is used and not the index of this order.
    let tail = format!("ORDER BY -m.message LIMIT {MESSAGES_OF_ONE_ID_MAX}");
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let rows = asked.query(&mut client, SUMMARY, &tail).await.map_err(read)?;
    let mut details = Vec::with_capacity(rows.len());
    for row in &rows {
        let number: i64 = row.get(0);
        let sql = "SELECT body FROM hapax.message WHERE message = $1";
        let bodies = client.query(sql, &[&number]).await.map_err(read)?;
        // The message was pruned after its row was read.
        let Some(body) = bodies.first() else { continue };
        let mut of_it = Conditions::default();
        of_it.add("d.message = ?", number);
        let deliveries =
            read_deliveries(&mut client, ALL_DELIVERIES, &of_it, "ORDER BY d.endpoint").await?;
        details.push(MessageDetail {
            summary: summary(row),
            body: Bytes::from(body.get::<_, Option<Vec<u8>>>(0).unwrap_or_default()),
            deliveries: deliveries.into_iter().map(|(_, delivery)| delivery).collect(),
        });
    }
    Ok(details)
}

pub(super) async fn deliveries(
    shared: &Shared,
    filter: DeliveryFilter,
) -> Result<Page<DeliveryDetail>, StoreError> {
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let range = message_range(&mut client, filter.since, filter.until).await?;
    let (mut asked, looked) = rows_read(&filter, range);
    asked.forget_said();
    if let Some(tenant) = &filter.tenant {
        asked.add("m.tenant = ?", text(tenant.as_str()));
    }
    if let Some(since) = filter.since {
        asked.add("m.created_at >= ?", since);
    }
    if let Some(until) = filter.until {
        asked.add("m.created_at < ?", until);
    }
    if let Some(status) = filter.status {
        let rank = RANKED.iter().position(|one| *one == status).unwrap_or_default();
        asked.require(format!(
            "hapax.delivery_rank(d.state, d.steps, \
             e.disabled_at IS NOT NULL OR e.failing IS NOT NULL, e.deleted_at IS NOT NULL) = {rank}"
        ));
    }
    let limit = filter.limit.clamp(1, PAGE_MAX);
    let tail = format!("ORDER BY d.message DESC, d.endpoint DESC LIMIT {}", limit + 1);
    let rows = read_deliveries(&mut client, &format!("({looked})"), &asked, &tail).await?;
    let mut listed =
        page(rows.into_iter().map(|(place, detail)| (cursor(place), detail)).collect(), limit);
    if listed.next.is_none()
        && let Some((place, time)) = read_up_to(&mut client, &filter, range).await?
    {
        listed.next = Some(Cursor(cursor(place)));
        listed.searched_to = Some(time).filter(|_| listed.items.len() < limit);
    }
    Ok(listed)
}

/// A statement for the rows that a list reads at most. Its conditions concern only columns of deliveries,
/// for which there are indexes. All other conditions only remove rows from its result.
fn rows_read(filter: &DeliveryFilter, (low, before): (i64, i64)) -> (Conditions, String) {
    let mut asked = Conditions::default();
    asked.add("d.message >= ?", low);
    asked.add("d.message < ?", before);
    if let Some(endpoint) = filter.endpoint {
        asked.add(
            "d.endpoint = (SELECT x.endpoint FROM hapax.endpoint x WHERE x.id = ?)",
            endpoint.0,
        );
    }
    if let Some(message) = &filter.message {
        asked.add(
            "d.message = ANY (ARRAY(SELECT x.message FROM hapax.message x WHERE x.id = ?))",
            text(message),
        );
    }
    if let Some(key) = &filter.key {
        asked.add(
            "d.message = ANY (ARRAY(SELECT x.message FROM hapax.message x WHERE x.key = ?))",
            text(key),
        );
    }
    match filter.status {
        Some(DeliveryStatus::Dead) => asked.require("d.state = hapax.delivery_state('dead')"),
        Some(DeliveryStatus::Failed) => {
            asked.require("d.state = hapax.delivery_state('ready') AND d.steps > 0");
        }
        Some(DeliveryStatus::Sending) => asked.require("d.state = hapax.delivery_state('leased')"),
        Some(DeliveryStatus::Parked) => asked.require("d.state = hapax.delivery_state('parked')"),
        Some(
            DeliveryStatus::Held
            | DeliveryStatus::Waiting
            | DeliveryStatus::Delivered
            | DeliveryStatus::Cancelled,
        )
        | None => {}
    }
    if let Some(Cursor(before)) = filter.before {
        let endpoint = before & ((1 << ENDPOINT_BITS) - 1);
        let message = i64::try_from(before >> ENDPOINT_BITS).unwrap_or(i64::MAX);
        asked.add(&format!("(d.message, d.endpoint) < (?, {endpoint})"), message);
    }
    let looked = asked.subquery("SELECT d.* FROM hapax.delivery d");
    let most = rows_max(filter.bound);
    let looked = format!("{looked} ORDER BY d.message DESC, d.endpoint DESC LIMIT {most}");
    (asked, looked)
}

/// The most rows that one page reads.
fn rows_max(bound: ReadBound) -> usize {
    match bound {
        ReadBound::Time(_) => LIST_ROWS_READ_MAX,
        ReadBound::Rows(most) => most.max(1),
    }
}

fn cursor((message, endpoint): (i64, i32)) -> u128 {
    (u128::from(message.unsigned_abs()) << ENDPOINT_BITS) | u128::from(endpoint.unsigned_abs())
}

/// The last row that a list has read, if it stopped there, and when its message was published.
async fn read_up_to(
    client: &mut PooledClient,
    filter: &DeliveryFilter,
    range: (i64, i64),
) -> Result<Option<((i64, i32), Timestamp)>, StoreError> {
    let (mut asked, looked) = rows_read(filter, range);
    asked.forget_said();
    let head = format!(
        "SELECT d.message, d.endpoint, m.created_at FROM ( \
             SELECT l.message, l.endpoint FROM ({looked}) l OFFSET {}) d \
         JOIN hapax.message m ON m.message = d.message",
        rows_max(filter.bound) - 1
    );
    let rows = asked.query(client, &head, "").await.map_err(read)?;
    Ok(rows.first().map(|row| ((row.get(0), row.get(1)), row.get(2))))
}

pub(super) async fn delivery(
    shared: &Shared,
    id: DeliveryId,
) -> Result<Option<DeliveryDetail>, StoreError> {
    let (message, endpoint) = message_and_endpoint(id);
    let mut asked = Conditions::default();
    asked.add("d.message = ?", message);
    asked.add("d.endpoint = ?", endpoint);
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let found = read_deliveries(&mut client, ALL_DELIVERIES, &asked, "").await?;
    // An id with the same message and endpoint but another time is another id.
    Ok(found.into_iter().map(|(_, detail)| detail).find(|detail| detail.id == id))
}

/// Deliveries with their attempts, and the numbers of the message and the endpoint of each.
async fn read_deliveries(
    client: &mut PooledClient,
    from: &str,
    asked: &Conditions,
    tail: &str,
) -> Result<Vec<((i64, i32), DeliveryDetail)>, StoreError> {
    let head = format!(
        "{DETAIL} FROM {from} d JOIN hapax.message m ON m.message = d.message \
         JOIN hapax.endpoint e ON e.endpoint = d.endpoint"
    );
    let rows = asked.query(client, &head, tail).await.map_err(read)?;
    let messages: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    let endpoints: Vec<i32> = rows.iter().map(|row| row.get(1)).collect();
    let notes = client
        .query(
            "SELECT a.message, a.endpoint, a.attempt, a.started_at, a.took_ms, a.answer_status, a.error, \
             a.answer, a.node \
             FROM unnest($1::bigint[], $2::integer[]) r (message, endpoint) \
             JOIN hapax.delivery_attempt a ON a.message = r.message AND a.endpoint = r.endpoint \
             ORDER BY a.message, a.endpoint, a.attempt",
            &[&messages, &endpoints],
        )
        .await
        .map_err(read)?;
    let actions = client
        .query(
            "SELECT a.message, a.endpoint, a.what, a.who, a.reason, a.at FROM hapax.sending_action a \
             WHERE a.message = ANY ($1) ORDER BY a.action",
            &[&messages],
        )
        .await
        .map_err(read)?;
    let mut deliveries: Vec<((i64, i32), DeliveryDetail)> =
        rows.iter().filter_map(detail).collect();
    for (place, delivery) in &mut deliveries {
        let (message, endpoint) = *place;
        // An action without an endpoint applies to all deliveries of the message.
        let of_it = actions.iter().filter(|row| {
            row.get::<_, i64>(0) == message
                && row.get::<_, Option<i32>>(1).is_none_or(|named| named == endpoint)
        });
        delivery.actions = of_it.map(action).collect();
        let of_it = notes.iter().filter(|row| (row.get(0), row.get(1)) == *place);
        let mut attempts: Vec<DeliveryAttempt> = of_it.map(attempt).collect();
        // The attempt that delivered is in the delivery's row, and is the last.
        attempts.append(&mut delivery.attempts);
        delivery.attempts = attempts;
    }
    Ok(deliveries)
}

fn action(row: &Row) -> ActionNote {
    ActionNote { action: row.get(2), who: row.get(3), reason: row.get(4), at: row.get(5) }
}

fn attempt(row: &Row) -> DeliveryAttempt {
    DeliveryAttempt {
        n: count(row.get(2)),
        at: row.get(3),
        took_ms: row.get::<_, Option<i64>>(4).map(i64::unsigned_abs),
        status: row.get::<_, Option<i32>>(5).and_then(|status| u16::try_from(status).ok()),
        error: row.get(6),
        answer: row.get(7),
        node: row.get(8),
    }
}

fn detail(row: &Row) -> Option<((i64, i32), DeliveryDetail)> {
    let phase = phase_of(row.get(2));
    let at: Timestamp = row.get(5);
    let standing = match (row.get(22), row.get(20), row.get(23)) {
        (true, _, _) => EndpointStanding::Deleted,
        (false, true, _) => EndpointStanding::Disabled,
        (false, false, true) => EndpointStanding::Failing,
        (false, false, false) => EndpointStanding::Active,
    };
    let status = DeliveryStatus::of(phase, count(row.get(3)), standing);
    let reason = match status {
        DeliveryStatus::Held => row.get(21),
        DeliveryStatus::Parked => Some(KEY_WAITS.to_owned()),
        DeliveryStatus::Cancelled if phase.is_open() => Some(ENDPOINT_DELETED.to_owned()),
        DeliveryStatus::Dead
        | DeliveryStatus::Failed
        | DeliveryStatus::Sending
        | DeliveryStatus::Waiting
        | DeliveryStatus::Delivered
        | DeliveryStatus::Cancelled => row.get(8),
    };
    let delivered = (phase == DeliveryPhase::Delivered).then(|| DeliveryAttempt {
        n: count(row.get(4)),
        at: row.get::<_, Option<Timestamp>>(6).unwrap_or(at),
        took_ms: row.get::<_, Option<i64>>(9).map(i64::unsigned_abs),
        status: row.get::<_, Option<i32>>(10).and_then(|status| u16::try_from(status).ok()),
        error: None,
        answer: row.get(11),
        node: row.get::<_, Option<String>>(7).unwrap_or_default(),
    });
    let endpoint = EndpointId(row.get(18));
    let detail = DeliveryDetail {
        id: DeliveryId(row.get::<_, Uuid>(17)),
        message: row.get(12),
        message_type: row.get(13),
        key: row.get(14),
        tenant: row.get(15),
        endpoint,
        url: settings(endpoint, row.get(19))?.url,
        status,
        reason,
        attempt: count(row.get(4)),
        created_at: row.get(16),
        // A parked delivery has no due time.
        due_at: (phase.is_open() && phase != DeliveryPhase::Parked).then_some(at),
        finished_at: (!phase.is_open()).then_some(at),
        attempts: delivered.into_iter().collect(),
        actions: Vec::new(),
    };
    Some(((row.get(0), row.get(1)), detail))
}

/// The backlog, in one statement. Each endpoint is read once, however many deliveries wait for it.
pub(super) async fn backlog(shared: &Shared) -> Result<DeliveryBacklog, StoreError> {
    let most = i64::try_from(LANE_COUNT_MAX).unwrap_or(i64::MAX);
    let asked = async {
        let mut client = shared.pools.lists.checkout().await?;
        let rows = client.query(include_str!("backlog.sql"), &[&most]).await?;
        let row = only(&rows)?;
        let number = |at: usize| row.get::<_, i64>(at).unsigned_abs();
        Ok::<_, PgError>(DeliveryBacklog {
            waiting: number(0),
            sending: number(1),
            held: number(2),
            dead: number(3),
            parked: number(4),
            oldest_due: row.get(5),
        })
    };
    asked.await.map_err(read)
}

fn count(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}
