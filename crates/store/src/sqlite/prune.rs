//! Retention: deletes finished, expired data in small slices between the batches.
//!
//! Bodies and keys have separate horizons. An event past the first horizon loses its body, its history and
//! its jobs. The event keeps a narrow row, so that a late copy is still recognised. Past the second horizon
//! the row and its key are deleted too. Events that are open, dead or in review stay. Each Idempotency-Key
//! has its own expiry ([`ledger::forget`]). A plan of an operator that has ended is kept as long as a body
//! ([`plans::forget`]).
//!
//! Rows are deleted by ranges of events. Rows of one time are adjacent, so deleting a range empties
//! whole pages, which the next events fill. An unfinished event between two finished ones splits
//! the range.
//!
//! Each round reads the bodies from old to new. A body exists exactly while its event is whole, so
//! a round reads only events that earlier rounds have left, and newer ones. The keys are walked
//! once for each horizon; only this process knows how far a walk has come. A walk must leave a key
//! if its event is unfinished or its guard is kept for longer. Each round checks those keys again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use hapax_core::job::Phase;
use hapax_core::store::{Horizon, Status};
use hapax_core::{EventKey, KeyHash, SourceName, Tenant};
use rusqlite::Connection;

use super::outbox::{MessageScan, prune_slice};
use super::row::{EventState, micros, phase_of, pruned_as, status_of_pruned, timestamp};
use super::tenant_deletion::Erased;
use super::transaction::Transaction;
use super::writer::Writer;
use super::{ledger, order, plans};
use crate::limits::PRUNE_SLICE_MAX;

/// The most events of one slice. An ack waits for at most one slice: half a millisecond.
const SLICE: usize = 100;

/// Events between two checks of the clock.
const PIECE: usize = 50;

/// The tables that are deleted with the body of an event, and the column that names the event.
const HISTORY: [(&str, &str); 7] = [
    ("hapax_body", "seq"),
    ("hapax_search_value", "seq"),
    ("hapax_job", "event_seq"),
    ("hapax_attempt", "event_seq"),
    ("hapax_arrival", "event_seq"),
    ("hapax_copy", "event_seq"),
    ("hapax_action", "event_seq"),
];

/// The tables that are deleted with the narrow row of an event, and the column that names the
/// event.
const NARROW: [(&str, &str); 4] = [
    ("hapax_guard", "event_seq"),
    // Copies that arrived after the body was deleted were still counted.
    ("hapax_arrival", "event_seq"),
    ("hapax_copy", "event_seq"),
    ("hapax_event", "seq"),
];

/// The most keys that a walk leaves and remembers; at this number the walk pauses.
const HELD_MAX: usize = 10_000;

/// The progress of retention. The progress advances only after the deletions are committed.
#[derive(Debug, Default)]
pub(super) struct PruneProgress {
    /// The last body that this round has checked.
    body: i64,
    /// For each source, the arrival time of the oldest event that this round has left unfinished.
    unfinished: BTreeMap<String, i64>,
    /// The next lane whose marks are checked.
    lane: i64,
    /// The walks over the keys: one for all sources with the same horizon.
    walks: BTreeMap<Vec<String>, KeyScan>,
    /// The progress over messages.
    pub(super) messages: MessageScan,
}

/// A walk over the keys, from old to new.
#[derive(Debug, Default)]
struct KeyScan {
    /// The last event whose key was checked.
    passed: i64,
    /// Events up to `passed` whose keys could not be deleted yet and that no longer have a body.
    held: BTreeSet<i64>,
    /// The last of these events that this round has checked.
    held_passed: i64,
}

impl PruneProgress {
    /// The walk that has passed this event, if any.
    fn passed(&self, event: &EventWithBody) -> Option<&KeyScan> {
        let is_of = |sources: &[String]| sources.iter().any(|one| one == event.source.as_str());
        let found = self.walks.iter().find(|(sources, _)| is_of(sources)).map(|(_, walk)| walk);
        found.filter(|walk| walk.passed >= event.seq)
    }

    /// Adds the key of a stripped event to those that its walk has left, if the walk has passed it.
    fn stripped(&mut self, event: &EventWithBody) {
        let is_of = |sources: &[String]| sources.iter().any(|one| one == event.source.as_str());
        let walk = self.walks.iter_mut().find(|(sources, _)| is_of(sources));
        if let Some((_, walk)) = walk.filter(|(_, walk)| walk.passed >= event.seq) {
            walk.held.insert(event.seq);
        }
    }
}

/// An event that still has its body.
struct EventWithBody {
    seq: i64,
    received_at: i64,
    source: SourceName,
    event_state: EventState,
    /// The states of its jobs.
    jobs: Vec<(Phase, u32)>,
}

/// The narrow row of an event.
struct PrunedRow {
    seq: i64,
    key: EventKey,
    guard: Option<[u8; 16]>,
    guard_until: Option<i64>,
    received_at: i64,
    is_pruned: bool,
}

/// Checks up to `limit` events for each horizon and as many Idempotency-Keys, for a few
/// milliseconds. Returns true if there may be more.
pub(super) fn slice(
    writer: &mut Writer,
    horizon: &Horizon,
    limit: usize,
) -> rusqlite::Result<bool> {
    let limit = limit.min(SLICE);
    let more_reservations = ledger::forget(writer, limit)?;
    let more_messages = prune_slice(writer, horizon, limit)?;
    let more_plans = plans::forget(writer, horizon, limit)?;
    let more_bodies = strip(writer, horizon, limit)?;
    let more_keys = forget(writer, horizon, limit)?;
    // The events that are left are known only after a whole round.
    let more_marks = !more_bodies && forget_marks(writer, horizon, limit)?;
    Ok(more_reservations || more_messages || more_plans || more_bodies || more_keys || more_marks)
}

/// Deletes order marks that no event can still need, lane by lane.
fn forget_marks(writer: &mut Writer, horizon: &Horizon, limit: usize) -> rusqlite::Result<bool> {
    let Some(last) = writer.lanes.last_with_old_marks() else { return Ok(false) };
    let (now, until) = (writer.now(), Instant::now() + PRUNE_SLICE_MAX);
    let (mut lane, mut gone) = (writer.prune_progress.lane, 0);
    while lane <= last && gone < limit && Instant::now() < until {
        let bound = writer.lanes.forgets_marks(lane).and_then(|source| {
            let unfinished = writer.prune_progress.unfinished.get(source.as_str()).copied();
            horizon.marks_before(source, now, unfinished.map(timestamp))
        });
        if let Some(before) = bound
            && order::has_old_marks(&writer.conn, lane, before)?
        {
            let tx = Transaction::begin_unsynced(&writer.conn)?;
            gone += order::forget_marks(&writer.conn, lane, before, limit - gone)?;
            tx.commit()?;
        }
        // A lane that may have more marks is checked again.
        lane += i64::from(gone < limit);
    }
    let is_over = lane > last;
    writer.prune_progress.lane = if is_over { 0 } else { lane };
    Ok(!is_over)
}

/// Deletes the body and history of finished events past their time.
fn strip(writer: &mut Writer, horizon: &Horizon, limit: usize) -> rusqlite::Result<bool> {
    let (before, until) = (micros(horizon.events_before), Instant::now() + PRUNE_SLICE_MAX);
    if writer.prune_progress.body == 0 {
        writer.prune_progress.unfinished.clear();
    }
    let now = micros(writer.now());
    let mut looked =
        next_events_with_bodies(&writer.conn, writer.prune_progress.body, before, now, limit)?;
    let is_last = looked.len() < limit;
    let Some(mut last) = looked.last().map(|event| event.seq) else {
        writer.prune_progress.body = 0;
        return Ok(false);
    };
    add_jobs(&writer.conn, &mut looked)?;
    let prune_progress = &writer.prune_progress;
    let stays = |event: &EventWithBody| {
        let no_room =
            prune_progress.passed(event).is_some_and(|walk| walk.held.len() + SLICE > HELD_MAX);
        event.received_at >= before || event.ends_as().is_none() || no_room
    };
    let (mut stripped, mut is_cut) = (Vec::new(), false);
    let tx = Transaction::begin_unsynced(&writer.conn)?;
    // A run is deleted in pieces, so that a long one also stops in time.
    for piece in looked.split(stays).flat_map(|run| run.chunks(PIECE)) {
        let (Some(first), Some(end)) = (piece.first(), piece.last()) else { continue };
        mark(&writer.conn, piece)?;
        delete_range(&writer.conn, &HISTORY, first.seq, end.seq)?;
        stripped.push(piece);
        if Instant::now() >= until && end.seq < last {
            (last, is_cut) = (end.seq, true);
            break;
        }
    }
    tx.commit()?;
    let is_left = |one: &&EventWithBody| one.seq <= last && one.received_at < before && stays(one);
    let left: Vec<&EventWithBody> = looked.iter().filter(is_left).collect();
    for event in left {
        let source = event.source.as_str();
        let unfinished = &mut writer.prune_progress.unfinished;
        match unfinished.get_mut(source) {
            Some(oldest) => *oldest = event.received_at.min(*oldest),
            None => drop(unfinished.insert(source.to_owned(), event.received_at)),
        }
    }
    for event in stripped.into_iter().flatten() {
        writer.prune_progress.stripped(event);
    }
    writer.prune_progress.body = if is_last && !is_cut { 0 } else { last };
    Ok(!is_last || is_cut)
}

/// Deletes body, history and jobs of up to `limit` events of a tenant after `passed` and up to `last`, finished or
/// not, in the open transaction. An unfinished event counts as discarded. An event without a body loses the rows
/// of its copies.
pub(super) fn erase(
    writer: &mut Writer,
    tenant: &Tenant,
    passed: i64,
    last: i64,
    limit: usize,
) -> rusqlite::Result<Erased> {
    let found: Vec<(i64, SourceName, Box<str>, bool)> = writer
        .conn
        .prepare_cached(
            "SELECT e.seq, p.source, e.event_id, e.pruned < 0
             FROM hapax_event e CROSS JOIN hapax_pair p ON p.pair = e.pair
             WHERE e.seq > ?1 AND e.seq <= ?2 AND p.tenant = ?3
               AND (e.pruned < 0
                    OR EXISTS (SELECT 1 FROM hapax_copy c WHERE c.event_seq = e.seq)
                    OR EXISTS (SELECT 1 FROM hapax_arrival a WHERE a.event_seq = e.seq))
             ORDER BY e.seq LIMIT ?4",
        )?
        .query_map((passed, last, tenant.as_str(), limit as i64), |row| {
            let source = SourceName::new(row.get_ref(1)?.as_str()?);
            Ok((row.get(0)?, source, row.get_ref(2)?.as_str()?.into(), row.get(3)?))
        })?
        .collect::<rusqlite::Result<_>>()?;
    let mut freed = BTreeSet::new();
    for (seq, source, event_id, has_body) in &found {
        if !has_body {
            delete_range(&writer.conn, &HISTORY, *seq, *seq)?;
            continue;
        }
        let mut events: Vec<EventWithBody> =
            next_events_with_bodies(&writer.conn, seq - 1, i64::MAX, i64::MAX, 1)?;
        events.retain(|event| event.seq == *seq);
        add_jobs(&writer.conn, &mut events)?;
        let ended = events.first().and_then(EventWithBody::ends_as).unwrap_or(Status::Discarded);
        freed.extend(leased_lanes(&writer.conn, *seq)?);
        writer
            .conn
            .prepare_cached(
                "UPDATE hapax_event
                 SET pruned = ?2, state = iif(state = 1 /* review */, 2 /* discarded */, state)
                 WHERE seq = ?1",
            )?
            .execute((seq, pruned_as(ended)))?;
        delete_range(&writer.conn, &HISTORY, *seq, *seq)?;
        for event in &events {
            writer.prune_progress.stripped(event);
        }
        let (tenant, source, event_id) = (tenant.clone(), source.clone(), event_id.clone());
        writer.remove_from_memory(EventKey { tenant, source, event_id }.hash());
    }
    let now = writer.now();
    for lane in freed {
        // Jobs of events that arrived later may wait for a job that was under way.
        let order = writer.lanes.spec_of(lane).and_then(|spec| spec.order.clone());
        order::ready_unheld(&writer.conn, &mut writer.lanes, lane, order.as_ref(), now)?;
    }
    let reached = found.last().filter(|_| found.len() == limit).map_or(last, |(seq, ..)| *seq);
    let count = found.iter().filter(|(.., has_body)| *has_body).count();
    Ok(Erased { reached, count })
}

fn leased_lanes(conn: &Connection, seq: i64) -> rusqlite::Result<Vec<i64>> {
    conn.prepare_cached(
        "SELECT lane FROM hapax_job WHERE event_seq = ?1 AND state = 1 /* leased */",
    )?
    .query_map([seq], |row| row.get(0))?
    .collect()
}

/// The next events that have their bodies, up to the first that arrived at `before` or later. An event with a
/// future time is included and does not end the range: it arrived while the clock was wrong, and events after
/// it may be old.
fn next_events_with_bodies(
    conn: &Connection,
    passed: i64,
    before: i64,
    now: i64,
    limit: usize,
) -> rusqlite::Result<Vec<EventWithBody>> {
    let mut next = conn.prepare_cached(
        "SELECT b.seq, e.received_at, p.source, e.state, e.review
         FROM hapax_body b CROSS JOIN hapax_event e ON e.seq = b.seq
         CROSS JOIN hapax_pair p ON p.pair = e.pair
         WHERE b.seq > ?1 ORDER BY b.seq LIMIT ?2",
    )?;
    let old = next.query_map((passed, limit as i64), |row| {
        let received_at = row.get(1)?;
        if (before..=now).contains(&received_at) {
            return Ok(None);
        }
        Ok(Some(EventWithBody {
            seq: row.get(0)?,
            received_at,
            source: SourceName::new(row.get_ref(2)?.as_str()?),
            event_state: EventState::from_columns(row.get(3)?, row.get(4)?),
            jobs: Vec::new(),
        }))
    })?;
    old.map_while(Result::transpose).collect()
}

/// Reads the jobs of all these events at once: their rows are adjacent too.
fn add_jobs(conn: &Connection, events: &mut [EventWithBody]) -> rusqlite::Result<()> {
    let (Some(first), Some(last)) = (events.first(), events.last()) else { return Ok(()) };
    let mut jobs = conn.prepare_cached(
        "SELECT event_seq, state, steps FROM hapax_job WHERE event_seq BETWEEN ?1 AND ?2
         ORDER BY event_seq, lane",
    )?;
    let mut jobs = jobs.query((first.seq, last.seq))?;
    let mut at = 0;
    while let Some(job) = jobs.next()? {
        let seq: i64 = job.get(0)?;
        while events.get(at).is_some_and(|event| event.seq < seq) {
            at += 1;
        }
        if let Some(event) = events.get_mut(at).filter(|event| event.seq == seq) {
            event.jobs.push((phase_of(job.get(1)?), job.get(2)?));
        }
    }
    Ok(())
}

impl EventWithBody {
    /// The status that the event ended with; `None` if it is unfinished. An event that was
    /// discarded for one handler may still be needed by another.
    fn ends_as(&self) -> Option<Status> {
        let status = match self.event_state.status() {
            Status::Ignored => Status::of_jobs(self.jobs.iter().copied()),
            status => status,
        };
        let is_over = self.jobs.iter().all(|(phase, _)| phase.is_over());
        (status.is_final() && is_over).then_some(status)
    }
}

/// Records how each event ended: one statement for all with the same status.
fn mark(conn: &Connection, run: &[EventWithBody]) -> rusqlite::Result<()> {
    let mut update = conn.prepare_cached(
        "UPDATE hapax_event SET pruned = ?3 WHERE seq BETWEEN ?1 AND ?2 AND pruned < 0",
    )?;
    for alike in run.chunk_by(|one, next| one.ends_as() == next.ends_as()) {
        if let (Some(first), Some(last)) = (alike.first(), alike.last()) {
            let status = first.ends_as().unwrap_or(Status::Processed);
            update.execute((first.seq, last.seq, pruned_as(status)))?;
        }
    }
    Ok(())
}

fn delete_range(
    conn: &Connection,
    tables: &[(&str, &str)],
    first: i64,
    last: i64,
) -> rusqlite::Result<()> {
    for (table, column) in tables {
        conn.prepare_cached(&format!("DELETE FROM {table} WHERE {column} BETWEEN ?1 AND ?2"))?
            .execute((first, last))?;
    }
    Ok(())
}

/// Deletes events without a body whose keys are past their source's horizon.
fn forget(writer: &mut Writer, horizon: &Horizon, limit: usize) -> rusqlite::Result<bool> {
    // A running merge would bring deleted keys back, and is over in a moment.
    if writer.index.is_merging() {
        return Ok(false);
    }
    let mut groups: BTreeMap<i64, Vec<String>> = BTreeMap::new();
    for (source, before) in &horizon.keys_before {
        groups.entry(micros(*before)).or_default().push(source.to_string());
    }
    for sources in groups.values_mut() {
        sources.sort_unstable();
    }
    // With changed settings the walk starts again.
    writer.prune_progress.walks.retain(|known, _| groups.values().any(|sources| sources == known));
    let mut more = false;
    for (before, sources) in groups {
        let mut walk = writer.prune_progress.walks.remove(&sources).unwrap_or_default();
        let walked = walk_slice(writer, &mut walk, &sources, before, limit);
        // If a slice ends with an error, the writer reloads everything and the walk starts again.
        writer.prune_progress.walks.insert(sources, walk);
        more |= walked?;
    }
    Ok(more)
}

/// One slice of a walk. Returns true if there may be more.
fn walk_slice(
    writer: &mut Writer,
    walk: &mut KeyScan,
    sources: &[String],
    before: i64,
    limit: usize,
) -> rusqlite::Result<bool> {
    let is_ours = |event: &PrunedRow| {
        let source = event.key.source.as_str();
        sources.binary_search_by(|one| one.as_str().cmp(source)).is_ok()
    };
    // The events that earlier slices have left.
    let again: Vec<i64> = walk.held.range(walk.held_passed + 1..).take(limit).copied().collect();
    let mut looked = Vec::with_capacity(again.len());
    for seq in &again {
        let found = next_events(&writer.conn, seq - 1, i64::MAX, i64::MAX, 1)?;
        looked.extend(found.into_iter().filter(|event| event.seq == *seq));
    }
    let gone = forget_old(writer, looked.iter().filter(|event| event.received_at < before))?;
    let is_there = |seq: &i64| looked.iter().any(|event| event.seq == *seq);
    walk.held.retain(|seq| !gone.contains(seq) && (!again.contains(seq) || is_there(seq)));
    walk.held_passed = again.last().copied().unwrap_or(walk.held_passed);

    let room = HELD_MAX.saturating_sub(walk.held.len()).min(limit);
    let now = micros(writer.now());
    let looked = next_events(&writer.conn, walk.passed, before, now, room)?;
    let is_old = |event: &&PrunedRow| is_ours(event) && event.received_at < before;
    let gone = forget_old(writer, looked.iter().filter(is_old))?;
    // An event that still has its body is added when it loses the body.
    let left = looked.iter().filter(|event| is_ours(event) && event.is_pruned);
    walk.held.extend(left.map(|event| event.seq).filter(|seq| !gone.contains(seq)));
    walk.passed = looked.last().map_or(walk.passed, |event| event.seq);
    let more = again.len() == limit || (room > 0 && looked.len() == room);
    if !more {
        walk.held_passed = 0;
    }
    Ok(more)
}

/// Deletes the events among these that have neither a body nor a valid guard. A guard is kept for its own
/// time, even if the key is kept for less.
fn forget_old<'a>(
    writer: &mut Writer,
    events: impl Iterator<Item = &'a PrunedRow>,
) -> rusqlite::Result<BTreeSet<i64>> {
    let now = micros(writer.now());
    let pruned: Vec<&PrunedRow> = events.filter(|event| event.is_pruned).collect();
    let mut old = Vec::with_capacity(pruned.len());
    for run in pruned.chunk_by(|one, next| one.seq + 1 == next.seq) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let guarded: BTreeSet<i64> = writer
            .conn
            .prepare_cached(
                "SELECT event_seq FROM hapax_guard
                 WHERE event_seq BETWEEN ?1 AND ?2 AND until > ?3",
            )?
            .query_map((first.seq, last.seq, now), |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        let holds = |event: &PrunedRow| {
            event.guard_until.is_some_and(|until| until > now) || guarded.contains(&event.seq)
        };
        old.extend(run.iter().copied().filter(|event| !holds(event)));
    }
    forget_all(writer, &old)?;
    Ok(old.into_iter().map(|event| event.seq).collect())
}

/// The next events, up to the first that arrived at `before` or later, as [`next_events_with_bodies`] finds them.
fn next_events(
    conn: &Connection,
    passed: i64,
    before: i64,
    now: i64,
    limit: usize,
) -> rusqlite::Result<Vec<PrunedRow>> {
    let mut next = conn.prepare_cached(
        "SELECT e.seq, p.tenant, p.source, e.event_id, e.guard_hash, e.received_at, e.pruned,
                e.guard_until
         FROM hapax_event e CROSS JOIN hapax_pair p ON p.pair = e.pair
         WHERE e.seq > ?1 ORDER BY e.seq LIMIT ?2",
    )?;
    let old = next.query_map((passed, limit as i64), |row| {
        let received_at = row.get(5)?;
        if (before..=now).contains(&received_at) {
            return Ok(None);
        }
        Ok(Some(PrunedRow {
            seq: row.get(0)?,
            key: EventKey {
                tenant: Tenant::new(row.get_ref(1)?.as_str()?),
                source: SourceName::new(row.get_ref(2)?.as_str()?),
                event_id: row.get_ref(3)?.as_str()?.into(),
            },
            guard: row.get(4)?,
            received_at,
            is_pruned: status_of_pruned(row.get(6)?).is_some(),
            guard_until: row.get(7)?,
        }))
    })?;
    old.map_while(Result::transpose).collect()
}

/// Deletes these events and their keys.
fn forget_all(writer: &mut Writer, events: &[&PrunedRow]) -> rusqlite::Result<()> {
    let Some(last) = events.last().map(|event| event.seq) else { return Ok(()) };
    // In sorted order, so that keys of one page are deleted together.
    let mut hashes: Vec<KeyHash> = events
        .iter()
        .flat_map(|event| std::iter::once(event.key.hash()).chain(event.guard.map(KeyHash)))
        .collect();
    hashes.sort_unstable();
    let tx = Transaction::begin_unsynced(&writer.conn)?;
    for hash in &hashes {
        writer.index.forget(&writer.conn, hash)?;
    }
    for run in events.chunk_by(|one, next| one.seq + 1 == next.seq) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        delete_range(&writer.conn, &NARROW, first.seq, last.seq)?;
    }
    // The highest number ever assigned stays known, even after its event is deleted.
    writer
        .conn
        .prepare_cached("UPDATE hapax_meta SET value = max(value, ?1) WHERE name = 'last_seq'")?
        .execute([last])?;
    tx.commit()?;
    // Memory drops the entries only now, because a reader might add them again before.
    hashes.iter().for_each(|hash| writer.shared.recent.remove(hash));
    Ok(())
}
