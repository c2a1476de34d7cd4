//! Makes the events of one batch of requests durable.
//!
//! Most receipts need one statement, `sql/insert_events.sql`. Receipts that lose a race there are
//! read by a second statement. Receipts that need more (late ones, replays, derived keys,
//! conflicts) go through the function `hapax.ingest`. If the database refuses a batch, each request
//! is tried alone, so that one bad request fails alone.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use hapax_core::job::Phase;
use hapax_core::store::{
    ArrivalInfo, Cause, EventId, Ingest, KnownEvent, NewJob, Status, StoreError, Verdict,
};
use hapax_core::{KeyHash, Receipt, Timeliness};
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::connect::{PgError, retried};
use super::epoch::Epoch;
use super::ingest_rows::Rows;
use super::lane_ids::LaneName;
use super::partitions;
use super::row::{EventState, hash_of, of_hash};
use super::{CacheableEvent, Shared};
use crate::recent::{Recent, ShardMoment, adds_nothing};

/// How often a statement is tried, if missing partitions or lanes are created between the tries.
const MENDS_MAX: u32 = 3;

/// A receipt to be decided.
pub(super) struct PendingReceipt<'a> {
    pub(super) receipt: &'a Receipt,
    pub(super) jobs: &'a [NewJob],
    pub(super) via: &'a ArrivalInfo,
    /// The id of the event, if it is new.
    pub(super) id: EventId,
    /// A moment before the database was asked.
    moment: ShardMoment,
}

/// Those receipts of one request that the same statement decides.
struct ReceiptGroup<'a> {
    request: usize,
    items: Vec<(usize, PendingReceipt<'a>)>,
}

/// Which statement decides a receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IngestStatement {
    /// The single statement for most receipts.
    Short,
    /// The function `hapax.ingest`, for all other receipts.
    Long,
}

/// The database's verdict on an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowVerdict {
    Accepted(EventId),
    Duplicate(EventId),
    Conflict(EventId),
    Review(EventId),
    Promoted(EventId),
    /// The key exists: its event must be read.
    Taken,
}

type BatchVerdicts = Vec<Result<Vec<Option<Verdict>>, StoreError>>;

/// The verdicts of each request, in order.
pub(super) async fn decide(
    shared: &Shared,
    ingests: &[Ingest],
) -> Vec<Result<Vec<Verdict>, StoreError>> {
    let epoch = shared.epoch.confirmed();
    let mut board: BatchVerdicts =
        ingests.iter().map(|ingest| Ok(vec![None; ingest.receipts.len()])).collect();
    let (mut short, mut long) = (Vec::new(), Vec::new());
    for (request, ingest) in ingests.iter().enumerate() {
        let items = ingest.receipts.iter().enumerate().map(|(at, receipt)| {
            let jobs = ingest.jobs.get(at).map_or(&[][..], Vec::as_slice);
            let id = shared.ids.make(ingest.via.received_at);
            let moment = shared.recent.moment(&receipt.key_hash());
            (at, PendingReceipt { receipt, jobs, via: &ingest.via, id, moment })
        });
        let group = ReceiptGroup { request, items: items.collect() };
        match ingest.receipts.iter().any(takes_more) {
            true => long.push(group),
            false => short.push(group),
        }
    }
    let work = VerdictReader::new(shared, epoch);
    let row_verdicts = ask_each(shared, IngestStatement::Short, &short, &mut board).await;
    work.settle_short(short, row_verdicts, &mut board, &mut long).await;
    let row_verdicts = ask_each(shared, IngestStatement::Long, &long, &mut board).await;
    work.settle_long(&long, row_verdicts, &mut board).await;
    work.remember();
    let decided = || board.iter().flatten().flatten().flatten();
    let copies = decided().filter(|verdict| matches!(verdict, Verdict::Duplicate(_))).count();
    shared.lookup.note(copies, decided().count());
    let all = |verdicts: Vec<Option<Verdict>>| {
        let all: Option<Vec<_>> = verdicts.into_iter().collect();
        all.ok_or_else(|| StoreError::Unavailable("an event was left undecided".into()))
    };
    board.into_iter().map(|verdicts| verdicts.and_then(all)).collect()
}

/// The verdicts of each request that contains only plain copies of committed events. All requests
/// share one statement, which only reads. An answer counts only if the server's epoch was confirmed
/// before and after it.
pub(super) async fn plain_copies(shared: &Shared, ingests: &[Ingest]) -> Vec<Option<Vec<Verdict>>> {
    let nothing = || ingests.iter().map(|_| None).collect();
    let Some(epoch) = shared.epoch.confirmed() else { return nothing() };
    let work = VerdictReader::new(shared, Some(epoch.clone()));
    let keys = || ingests.iter().flat_map(|ingest| &ingest.receipts).map(Receipt::key_hash);
    let mut moments = keys().map(|key| shared.recent.moment(&key)).collect::<Vec<_>>().into_iter();
    let hashes: Vec<Uuid> = keys().map(of_hash).collect();
    let existing = match work.existing(LookupBy::Hash, &hashes).await {
        Ok(existing) => existing,
        Err(error) => {
            tracing::debug!("looking copies up: {error}");
            return nothing();
        }
    };
    if shared.epoch.confirmed() != Some(epoch) {
        return nothing();
    }
    let existing: HashMap<KeyHash, Existing> =
        existing.into_iter().map(|existing| (existing.hash, existing)).collect();
    let all_of = |ingest: &Ingest| {
        let moments: Vec<ShardMoment> = moments.by_ref().take(ingest.receipts.len()).collect();
        let copies = ingest.receipts.iter().zip(moments).map(|(receipt, moment)| {
            let existing = existing.get(&receipt.key_hash())?;
            is_plain_copy(existing, receipt).then_some((existing, receipt, moment))
        });
        let copies: Vec<_> = copies.collect::<Option<_>>()?;
        let answer =
            |(existing, receipt, moment)| work.duplicate(existing, receipt, &ingest.via, moment);
        Some(copies.into_iter().map(answer).collect())
    };
    let verdicts = ingests.iter().map(all_of).collect();
    work.remember();
    verdicts
}

/// Whether a receipt needs the function from the start.
fn takes_more(receipt: &Receipt) -> bool {
    receipt.neighbours().is_some() || receipt.timeliness() != Timeliness::OnTime
}

type RowVerdicts = HashMap<(usize, usize), RowVerdict>;

/// Decides all groups with one statement; if the database refuses it, each group alone. A request
/// whose statement failed is marked in `board`.
async fn ask_each(
    shared: &Shared,
    way: IngestStatement,
    groups: &[ReceiptGroup<'_>],
    board: &mut BatchVerdicts,
) -> RowVerdicts {
    if groups.is_empty() {
        return RowVerdicts::new();
    }
    let all: Vec<&ReceiptGroup<'_>> = groups.iter().collect();
    let error = match ask(shared, way, &all).await {
        Ok(row_verdicts) => {
            shared.health.works();
            return row_verdicts;
        }
        Err(error) => error,
    };
    let mut row_verdicts = RowVerdicts::new();
    if error.is_outage() || groups.len() == 1 {
        fail(shared, groups, error, board);
        return row_verdicts;
    }
    tracing::warn!(requests = groups.len(), "a batch was refused, trying each alone: {error}");
    for group in groups {
        match ask(shared, way, &[group]).await {
            Ok(one) => row_verdicts.extend(one),
            Err(error) => fail(shared, std::slice::from_ref(group), error, board),
        }
    }
    row_verdicts
}

fn fail(shared: &Shared, groups: &[ReceiptGroup<'_>], error: PgError, board: &mut BatchVerdicts) {
    let is_outage = error.is_outage();
    let cause = Cause::new(error);
    if is_outage {
        shared.health.fails(&cause);
    }
    for group in groups {
        board[group.request] = Err(StoreError::Unavailable(cause.clone()));
    }
}

/// Runs one statement for all of `groups`. If a day's partition or a lane is missing, creates it
/// and tries again.
async fn ask(
    shared: &Shared,
    way: IngestStatement,
    groups: &[&ReceiptGroup<'_>],
) -> Result<RowVerdicts, PgError> {
    let mut items: Vec<(usize, usize, &PendingReceipt<'_>)> = groups
        .iter()
        .flat_map(|group| group.items.iter().map(|(at, item)| (group.request, *at, item)))
        .collect();
    // The sort is stable: of two receipts with the same key, the first one is decided first.
    items.sort_by_key(|(_, _, item)| item.receipt.key_hash());
    for _ in 1..MENDS_MAX {
        match retried(|| ask_once(shared, way, &items)).await {
            Err(error) if error.code() == Some(&SqlState::CHECK_VIOLATION) => {
                partitions::make_for(shared, items.iter().map(|(_, _, item)| item.id)).await?;
            }
            // A lane is missing, so the cached lanes belong to another database.
            Err(error) if error.code() == Some(&SqlState::NOT_NULL_VIOLATION) => {
                shared.names.clear();
            }
            answer => return answer,
        }
    }
    ask_once(shared, way, &items).await
}

async fn ask_once(
    shared: &Shared,
    way: IngestStatement,
    items: &[(usize, usize, &PendingReceipt<'_>)],
) -> Result<RowVerdicts, PgError> {
    let mut client = shared.pools.ingest.checkout().await?;
    let mut rows = Rows::default();
    let mut places = Vec::with_capacity(items.len());
    let mut row_verdicts = RowVerdicts::new();
    let mut keys = HashSet::new();
    for (request, at, item) in items {
        // A second receipt with the same key is a copy of the first one, or conflicts with it.
        if way == IngestStatement::Short && !keys.insert(item.receipt.key_hash()) {
            row_verdicts.insert((*request, *at), RowVerdict::Taken);
            continue;
        }
        let key = item.receipt.key();
        shared.names.pair(&mut client, &(key.tenant.clone(), key.source.clone())).await?;
        let mut lanes = Vec::with_capacity(item.jobs.len());
        for job in item.jobs {
            let (tenant, source) = (key.tenant.clone(), key.source.clone());
            let name = LaneName { tenant, source, handler: job.handler.clone() };
            lanes.push(shared.names.lane(&mut client, &name).await?);
        }
        rows.push(item, &lanes);
        if way == IngestStatement::Long {
            rows.push_doubt(item.receipt);
        }
        places.push((*request, *at, item.id));
    }
    match way {
        IngestStatement::Short => {
            let accepted = rows.insert(&mut client, shared.now()).await?;
            for (request, at, id) in places {
                let new = accepted.contains(&id.0);
                row_verdicts.insert(
                    (request, at),
                    if new { RowVerdict::Accepted(id) } else { RowVerdict::Taken },
                );
            }
        }
        IngestStatement::Long => {
            for (row, one) in rows.ingest(&mut client, shared.now()).await? {
                let (request, at, _) = *places.get(row).ok_or(PgError::Gone)?;
                row_verdicts.insert((request, at), one);
            }
        }
    }
    Ok(row_verdicts)
}

/// Converts the verdicts of rows, and keeps the cache up to date.
struct VerdictReader<'a> {
    shared: &'a Shared,
    epoch: Option<Epoch>,
    /// Events whose copies may be answered from memory and Redis once their work has ended.
    decided: Mutex<Vec<CacheableEvent>>,
}

/// The column by which an event is found: one statement for each, so that each uses its index.
#[derive(Debug, Clone, Copy)]
enum LookupBy {
    Hash,
    Id,
}

/// An event that existed before.
struct Existing {
    hash: KeyHash,
    body_hash: KeyHash,
    guard: Option<KeyHash>,
    event_state: EventState,
    known: KnownEvent,
}

impl<'a> VerdictReader<'a> {
    fn new(shared: &'a Shared, epoch: Option<Epoch>) -> Self {
        Self { shared, epoch, decided: Mutex::default() }
    }

    /// Reads the events of receipts that lost a race. Most are plain copies; the others go to the
    /// function.
    async fn settle_short<'g>(
        &self,
        groups: Vec<ReceiptGroup<'g>>,
        row_verdicts: RowVerdicts,
        board: &mut BatchVerdicts,
        long: &mut Vec<ReceiptGroup<'g>>,
    ) {
        let taken: Vec<Uuid> = groups
            .iter()
            .flat_map(|group| group.items.iter().map(|(at, item)| (group.request, *at, item)))
            .filter(|(request, at, _)| {
                row_verdicts.get(&(*request, *at)) == Some(&RowVerdict::Taken)
            })
            .map(|(_, _, item)| of_hash(item.receipt.key_hash()))
            .collect();
        let existing = match self.existing(LookupBy::Hash, &taken).await {
            Ok(existing) => existing,
            Err(error) => {
                let lost = groups.iter().filter(|group| {
                    let at = |at: &usize| row_verdicts.get(&(group.request, *at));
                    group.items.iter().any(|(place, _)| at(place) == Some(&RowVerdict::Taken))
                });
                let cause = Cause::new(error);
                for group in lost {
                    board[group.request] = Err(StoreError::Unavailable(cause.clone()));
                }
                Vec::new()
            }
        };
        let existing: HashMap<KeyHash, Existing> =
            existing.into_iter().map(|existing| (existing.hash, existing)).collect();
        for group in groups {
            let request = group.request;
            let mut rest = Vec::new();
            for (at, item) in group.items {
                let Ok(verdicts) = &mut board[request] else { break };
                match row_verdicts.get(&(request, at)) {
                    Some(RowVerdict::Accepted(id)) => {
                        verdicts[at] = Some(self.accepted(*id, &item))
                    }
                    Some(_) | None => match existing.get(&item.receipt.key_hash()) {
                        Some(existing) if is_plain_copy(existing, item.receipt) => {
                            verdicts[at] =
                                Some(self.duplicate(existing, item.receipt, item.via, item.moment));
                        }
                        Some(_) | None => rest.push((at, item)),
                    },
                }
            }
            if board[request].is_ok() && !rest.is_empty() {
                long.push(ReceiptGroup { request, items: rest });
            }
        }
    }

    async fn settle_long(
        &self,
        groups: &[ReceiptGroup<'_>],
        row_verdicts: RowVerdicts,
        board: &mut BatchVerdicts,
    ) {
        let again: Vec<Uuid> = row_verdicts
            .values()
            .filter_map(|row_verdicts| match row_verdicts {
                RowVerdict::Duplicate(id) | RowVerdict::Conflict(id) => Some(id.0),
                RowVerdict::Accepted(_)
                | RowVerdict::Review(_)
                | RowVerdict::Promoted(_)
                | RowVerdict::Taken => None,
            })
            .collect();
        let existing = self.existing(LookupBy::Id, &again).await;
        let existing: HashMap<EventId, Existing> = match existing {
            Ok(existing) => existing.into_iter().map(|one| (one.known.id, one)).collect(),
            Err(error) => {
                let cause = Cause::new(error);
                for group in groups {
                    board[group.request] = Err(StoreError::Unavailable(cause.clone()));
                }
                return;
            }
        };
        for group in groups {
            for (at, item) in &group.items {
                let Ok(verdicts) = &mut board[group.request] else { break };
                let Some(row_verdicts) = row_verdicts.get(&(group.request, *at)) else { continue };
                // The event was pruned since: only its id is known.
                let gone = |id| KnownEvent { id, status: Status::Processed, result: None };
                verdicts[*at] = Some(match row_verdicts {
                    RowVerdict::Accepted(id) => self.accepted(*id, item),
                    RowVerdict::Review(id) => Verdict::Review(*id),
                    RowVerdict::Promoted(id) => {
                        self.shared.note_copy(*id, item.via);
                        self.wake(item);
                        Verdict::Accepted(*id)
                    }
                    RowVerdict::Duplicate(id) => match existing.get(id) {
                        Some(existing) => {
                            self.duplicate(existing, item.receipt, item.via, item.moment)
                        }
                        None => Verdict::Duplicate(gone(*id)),
                    },
                    RowVerdict::Conflict(id) => Verdict::Conflict(
                        existing.get(id).map_or_else(|| gone(*id), |one| one.known.clone()),
                    ),
                    RowVerdict::Taken => continue,
                });
            }
        }
    }

    fn accepted(&self, id: EventId, item: &PendingReceipt<'_>) -> Verdict {
        self.wake(item);
        let phase = |job: &NewJob| if job.hopeless.is_some() { Phase::Dead } else { Phase::Ready };
        let status = Status::of_jobs(item.jobs.iter().map(|job| (phase(job), 0)));
        let known = KnownEvent { id, status, result: None };
        self.note(
            item.receipt,
            item.moment,
            Recent {
                body_hash: item.receipt.body_hash(),
                guard: item.receipt.guard().map(|guard| guard.hash),
                known,
                review: None,
            },
        );
        Verdict::Accepted(id)
    }

    fn duplicate(
        &self,
        existing: &Existing,
        receipt: &Receipt,
        via: &ArrivalInfo,
        moment: ShardMoment,
    ) -> Verdict {
        self.shared.note_copy(existing.known.id, via);
        if existing.hash == receipt.key_hash() {
            self.note(
                receipt,
                moment,
                Recent {
                    body_hash: existing.body_hash,
                    // The signed content was committed with this event or with another one.
                    guard: receipt.guard().map(|guard| guard.hash),
                    known: existing.known.clone(),
                    review: existing.event_state.waiting,
                },
            );
        }
        Verdict::Duplicate(existing.known.clone())
    }

    fn note(&self, receipt: &Receipt, moment: ShardMoment, recent: Recent) {
        let mut decided = self.decided.lock().expect("no panic happens under this lock");
        decided.push(CacheableEvent { key: receipt.key_hash(), moment, recent });
    }

    /// Caches the events whose work has ended, within the epoch in which they were read.
    fn remember(&self) {
        let decided = &mut *self.decided.lock().expect("no panic happens under this lock");
        self.shared.remember(self.epoch.as_ref(), std::mem::take(decided));
    }

    fn wake(&self, item: &PendingReceipt<'_>) {
        if item.jobs.iter().any(|job| job.hopeless.is_none()) {
            self.shared.arrived.notify_waiters();
        }
    }

    async fn existing(&self, by: LookupBy, names: &[Uuid]) -> Result<Vec<Existing>, PgError> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let known = match by {
            LookupBy::Hash => concat!(
                include_str!("sql/known.sql"),
                "WHERE e.hash = ANY ($1) AND NOT pg_is_in_recovery()"
            ),
            LookupBy::Id => concat!(include_str!("sql/known.sql"), "WHERE e.id = ANY ($1)"),
        };
        let mut client = self.shared.pools.ingest.checkout().await?;
        let rows = client.query(known, &[&names]).await?;
        Ok(rows
            .iter()
            .map(|row| {
                let event_state = EventState::new(row.get(3), row.get(4), row.get(5), row.get(6));
                let result: Option<&str> = row.get(7);
                let known = KnownEvent {
                    id: EventId(row.get(1)),
                    status: event_state.status,
                    result: result.map(Arc::from),
                };
                Existing {
                    hash: hash_of(row.get(0)),
                    body_hash: hash_of(row.get(2)),
                    guard: row.get::<_, Option<Uuid>>(8).map(hash_of),
                    event_state,
                    known,
                }
            })
            .collect())
    }
}

fn is_plain_copy(existing: &Existing, receipt: &Receipt) -> bool {
    let late = existing.event_state.waiting == Some(hapax_core::store::ReviewReason::Late);
    adds_nothing(receipt, existing.body_hash, existing.guard) && !late
}
