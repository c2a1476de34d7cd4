//! Making events durable. Requests queue up; a few writers, each on a connection of its own, take
//! what waits and commit it together: whoever arrives while a statement runs rides in the next.
//!
//! Most of it is one statement, `sql/insert_events.sql`. Who loses a race there is read by a second
//! one. What takes more than a look (late ones, replays, derived keys, conflicts) goes through the
//! function `hapax.ingest`. A batch that the database refuses is tried again request by request, so
//! that one poisonous request fails alone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hapax_core::job::Phase;
use hapax_core::store::{EventId, Ingest, Known, NewJob, Status, StoreError, Verdict, Via};
use hapax_core::{KeyHash, Receipt, Timeliness, Timestamp, failpoint};
use tokio::sync::{Notify, oneshot};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::Shared;
use super::connect::{Lent, PgError, retried};
use super::epoch::Epoch;
use super::names::{LaneAt, LaneName};
use super::partitions;
use super::row::{Standing, hash_of, of_hash, stamp, text};
use crate::limits::{
    ACK_MAX, BATCH_BYTES_MAX, BATCH_RECEIPTS_MAX, CONFLICTS_IN_FULL, WAITING_MAX, WORTH_A_COMMIT,
};
use crate::recent::Recent;

/// How often a statement is tried after what it lacked was made.
const MENDS_MAX: u32 = 3;

/// The queue in front of the writers.
#[derive(Debug)]
pub(super) struct Desk {
    waiting: Mutex<Line>,
    bell: Notify,
}

#[derive(Debug)]
struct Line {
    requests: VecDeque<Waiting>,
    /// Requests that ever came.
    brought: u64,
    /// Writers that are committing.
    at_work: usize,
    open: bool,
}

impl Line {
    /// Whether a writer should set out now. Alone it takes whatever there is; beside another one only
    /// what is worth a commit of its own, since whoever waits rides with the one that comes back.
    fn is_worth_it(&self) -> bool {
        let least = if self.at_work == 0 { 1 } else { WORTH_A_COMMIT };
        self.requests.len() >= least
    }
}

#[derive(Debug)]
struct Waiting {
    ingest: Ingest,
    answer: oneshot::Sender<Result<Vec<Verdict>, StoreError>>,
}

impl Desk {
    pub(super) fn new() -> Self {
        let line = Line { requests: VecDeque::new(), brought: 0, at_work: 0, open: true };
        Self { waiting: Mutex::new(line), bell: Notify::new() }
    }

    /// Waits for a commit that holds this request, as long as a sender would. It happens whoever stops
    /// waiting, so its outcome is then unknown.
    pub(super) async fn ingest(&self, ingest: Ingest) -> Result<Vec<Verdict>, StoreError> {
        let (answer, verdicts) = oneshot::channel();
        {
            let mut line = self.waiting.lock().expect("no panic happens under this lock");
            if !line.open {
                return Err(StoreError::Closed);
            }
            if line.requests.len() >= WAITING_MAX {
                return Err(StoreError::Busy);
            }
            line.brought += 1;
            line.requests.push_back(Waiting { ingest, answer });
            if line.is_worth_it() {
                self.bell.notify_one();
            }
        }
        let lost = |why: &str| Err(StoreError::Unavailable(why.into()));
        match tokio::time::timeout(ACK_MAX, verdicts).await {
            Ok(Ok(verdicts)) => verdicts,
            Ok(Err(_)) => lost("the commit was broken off"),
            Err(_) => lost("the database did not answer in time"),
        }
    }

    /// How many requests ever came.
    pub(super) fn brought(&self) -> u64 {
        self.waiting.lock().expect("no panic happens under this lock").brought
    }

    /// Nobody is let in any more.
    fn shut(&self) {
        self.waiting.lock().expect("no panic happens under this lock").open = false;
    }

    /// What waits, as much of it as one commit should hold, if it is worth one. Whoever gets any comes
    /// [back](Desk::back) when it is committed.
    fn take(&self) -> Vec<Waiting> {
        let mut line = self.waiting.lock().expect("no panic happens under this lock");
        let (mut batch, mut receipts, mut bytes) = (Vec::new(), 0, 0);
        if !line.is_worth_it() {
            return batch;
        }
        while receipts < BATCH_RECEIPTS_MAX && bytes < BATCH_BYTES_MAX {
            let Some(next) = line.requests.pop_front() else { break };
            receipts += next.ingest.receipts.len();
            bytes += next.ingest.receipts.iter().map(|one| one.body().len()).sum::<usize>();
            batch.push(next);
        }
        line.at_work += 1;
        batch
    }

    /// A writer is back, and about to look what waits.
    fn back(&self) {
        self.waiting.lock().expect("no panic happens under this lock").at_work -= 1;
    }
}

/// One writer: commits what waits until the store is closed and nothing waits any more.
pub(super) async fn keep_writing(shared: Arc<Shared>) {
    loop {
        let mut batch = shared.desk.take();
        if batch.is_empty() {
            if !shared.closing.is_cancelled() {
                tokio::select! {
                    () = shared.closing.cancelled() => {}
                    () = shared.desk.bell.notified() => {}
                }
                continue;
            }
            shared.desk.shut();
            // Whoever slipped in before the door shut is still served, by whoever is still at work
            // or by this one.
            batch = shared.desk.take();
            if batch.is_empty() {
                return;
            }
        }
        // A task of its own: should it panic, those who wait hear of it and the writer goes on.
        let work = Arc::clone(&shared);
        let done = tokio::spawn(async move { commit(&work, batch).await }).await;
        shared.desk.back();
        if done.is_err() {
            shared.health.fails("a writer panicked");
        }
    }
}

async fn commit(shared: &Shared, batch: Vec<Waiting>) {
    let began = Instant::now();
    let (ingests, answers): (Vec<_>, Vec<_>) =
        batch.into_iter().map(|waiting| (waiting.ingest, waiting.answer)).unzip();
    failpoint!("ingress.before_commit");
    let decided = decide(shared, &ingests).await;
    failpoint!("ingress.after_commit_before_ack");
    let receipts: usize = ingests.iter().map(|ingest| ingest.receipts.len()).sum();
    metrics::histogram!("hapax_store_commit_seconds").record(began.elapsed());
    metrics::histogram!("hapax_store_batch_size").record(receipts as f64);
    for (answer, verdicts) in answers.into_iter().zip(decided) {
        let _ = answer.send(verdicts);
    }
}

/// A receipt on its way.
struct Item<'a> {
    receipt: &'a Receipt,
    jobs: &'a [NewJob],
    via: &'a Via,
    /// The id it gets if it is new.
    id: EventId,
}

/// The receipts of one request that are asked about together.
struct Group<'a> {
    request: usize,
    items: Vec<(usize, Item<'a>)>,
}

/// Which of the two statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The one statement that most are.
    Short,
    /// The function for the rest.
    Long,
}

/// What the database said of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Accepted(EventId),
    Duplicate(EventId),
    Conflict(EventId),
    Review(EventId),
    Promoted(EventId),
    /// Something was there before: it must be read.
    Taken,
}

type Board = Vec<Result<Vec<Option<Verdict>>, StoreError>>;

/// The verdicts of each request, in their order.
async fn decide(shared: &Shared, ingests: &[Ingest]) -> Vec<Result<Vec<Verdict>, StoreError>> {
    let epoch = shared.epoch.confirmed();
    let mut board: Board =
        ingests.iter().map(|ingest| Ok(vec![None; ingest.receipts.len()])).collect();
    let (mut short, mut long) = (Vec::new(), Vec::new());
    for (request, ingest) in ingests.iter().enumerate() {
        let items = ingest.receipts.iter().enumerate().map(|(at, receipt)| {
            let jobs = ingest.jobs.get(at).map_or(&[][..], Vec::as_slice);
            let id = shared.ids.make(ingest.via.received_at);
            (at, Item { receipt, jobs, via: &ingest.via, id })
        });
        let group = Group { request, items: items.collect() };
        match ingest.receipts.iter().any(takes_more) {
            true => long.push(group),
            false => short.push(group),
        }
    }
    let work = Outcome { shared, epoch };
    let told = ask_each(shared, Way::Short, &short, &mut board).await;
    work.settle_short(short, told, &mut board, &mut long).await;
    let told = ask_each(shared, Way::Long, &long, &mut board).await;
    work.settle_long(&long, told, &mut board).await;
    let all = |verdicts: Vec<Option<Verdict>>| {
        let all: Option<Vec<_>> = verdicts.into_iter().collect();
        all.ok_or_else(|| StoreError::Unavailable("an event was left undecided".into()))
    };
    board.into_iter().map(|verdicts| verdicts.and_then(all)).collect()
}

/// Whether a receipt needs more than the one statement from the start.
fn takes_more(receipt: &Receipt) -> bool {
    receipt.guard().is_some()
        || receipt.earlier().is_some()
        || receipt.timeliness() != Timeliness::OnTime
}

type ToldOf = HashMap<(usize, usize), Told>;

/// Asks about all groups at once; where the database refuses that, about each alone. A request whose
/// asking failed is marked on the board.
async fn ask_each(shared: &Shared, way: Way, groups: &[Group<'_>], board: &mut Board) -> ToldOf {
    if groups.is_empty() {
        return ToldOf::new();
    }
    let all: Vec<&Group<'_>> = groups.iter().collect();
    let error = match ask(shared, way, &all).await {
        Ok(told) => {
            shared.health.works();
            return told;
        }
        Err(error) => error,
    };
    let mut told = ToldOf::new();
    if error.is_outage() || groups.len() == 1 {
        fail(shared, groups, &error, board);
        return told;
    }
    tracing::warn!(requests = groups.len(), "a batch was refused, trying each alone: {error}");
    for group in groups {
        match ask(shared, way, &[group]).await {
            Ok(one) => told.extend(one),
            Err(error) => fail(shared, std::slice::from_ref(group), &error, board),
        }
    }
    told
}

fn fail(shared: &Shared, groups: &[Group<'_>], error: &PgError, board: &mut Board) {
    if error.is_outage() {
        shared.health.fails(&error.to_string());
    }
    for group in groups {
        board[group.request] = Err(StoreError::Unavailable(error.to_string().into()));
    }
}

/// One statement for all of `groups`. What it lacks (a day's partition, a lane) is made, and then it
/// is tried again.
async fn ask(shared: &Shared, way: Way, groups: &[&Group<'_>]) -> Result<ToldOf, PgError> {
    let mut items: Vec<(usize, usize, &Item<'_>)> = groups
        .iter()
        .flat_map(|group| group.items.iter().map(|(at, item)| (group.request, *at, item)))
        .collect();
    // Stable: of two with the same key the first is decided first.
    items.sort_by_key(|(_, _, item)| item.receipt.key_hash());
    for _ in 1..MENDS_MAX {
        match retried(|| ask_once(shared, way, &items)).await {
            Err(error) if error.code() == Some(&SqlState::CHECK_VIOLATION) => {
                partitions::make_for(shared, items.iter().map(|(_, _, item)| item.id)).await?;
            }
            // The lanes in memory are of another database than this one.
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
    way: Way,
    items: &[(usize, usize, &Item<'_>)],
) -> Result<ToldOf, PgError> {
    let mut lent = shared.pools.ingest.lend().await?;
    let mut rows = Rows::default();
    let mut places = Vec::with_capacity(items.len());
    let mut told = ToldOf::new();
    let mut keys = HashSet::new();
    for (request, at, item) in items {
        // A second receipt with the same key is a copy or a conflict of the first one.
        if way == Way::Short && !keys.insert(item.receipt.key_hash()) {
            told.insert((*request, *at), Told::Taken);
            continue;
        }
        let key = item.receipt.key();
        shared.names.pair(&mut lent, &(key.tenant.clone(), key.source.clone())).await?;
        let mut lanes = Vec::with_capacity(item.jobs.len());
        for job in item.jobs {
            let (tenant, source) = (key.tenant.clone(), key.source.clone());
            let name = LaneName { tenant, source, handler: job.handler.clone() };
            lanes.push(shared.names.lane(&mut lent, &name).await?);
        }
        rows.push(item, &lanes);
        places.push((*request, *at, item.id));
    }
    match way {
        Way::Short => {
            let accepted = rows.insert(&mut lent, shared.now()).await?;
            for (request, at, id) in places {
                let new = accepted.contains(&id.0);
                told.insert((request, at), if new { Told::Accepted(id) } else { Told::Taken });
            }
        }
        Way::Long => {
            for (row, one) in rows.ingest(&mut lent, shared.now()).await? {
                let (request, at, _) = *places.get(row).ok_or(PgError::Gone)?;
                told.insert((request, at), one);
            }
        }
    }
    Ok(told)
}

/// Turns what the database said into verdicts, and keeps memory up to date.
struct Outcome<'a> {
    shared: &'a Shared,
    epoch: Option<Epoch>,
}

/// An event that was there before.
struct Existing {
    hash: KeyHash,
    body_hash: KeyHash,
    standing: Standing,
    known: Known,
}

impl Outcome<'_> {
    /// Those who lost are read. Most are plain copies; the others go the long way.
    async fn settle_short<'g>(
        &self,
        groups: Vec<Group<'g>>,
        told: ToldOf,
        board: &mut Board,
        long: &mut Vec<Group<'g>>,
    ) {
        let taken: Vec<Uuid> = groups
            .iter()
            .flat_map(|group| group.items.iter().map(|(at, item)| (group.request, *at, item)))
            .filter(|(request, at, _)| told.get(&(*request, *at)) == Some(&Told::Taken))
            .map(|(_, _, item)| of_hash(item.receipt.key_hash()))
            .collect();
        let existing = match self.existing(&taken, &[]).await {
            Ok(existing) => existing,
            Err(error) => {
                let lost = groups.iter().filter(|group| {
                    let at = |at: &usize| told.get(&(group.request, *at));
                    group.items.iter().any(|(place, _)| at(place) == Some(&Told::Taken))
                });
                for group in lost {
                    board[group.request] = Err(StoreError::Unavailable(error.to_string().into()));
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
                match told.get(&(request, at)) {
                    Some(Told::Accepted(id)) => verdicts[at] = Some(self.accepted(*id, &item)),
                    Some(_) | None => match existing.get(&item.receipt.key_hash()) {
                        Some(existing) if is_plain_copy(existing, &item) => {
                            verdicts[at] = Some(self.duplicate(existing, &item));
                        }
                        Some(_) | None => rest.push((at, item)),
                    },
                }
            }
            if board[request].is_ok() && !rest.is_empty() {
                long.push(Group { request, items: rest });
            }
        }
    }

    async fn settle_long(&self, groups: &[Group<'_>], told: ToldOf, board: &mut Board) {
        let again: Vec<Uuid> = told
            .values()
            .filter_map(|told| match told {
                Told::Duplicate(id) | Told::Conflict(id) => Some(id.0),
                Told::Accepted(_) | Told::Review(_) | Told::Promoted(_) | Told::Taken => None,
            })
            .collect();
        let existing = self.existing(&[], &again).await;
        let existing: HashMap<EventId, Existing> = match existing {
            Ok(existing) => existing.into_iter().map(|one| (one.known.id, one)).collect(),
            Err(error) => {
                for group in groups {
                    board[group.request] = Err(StoreError::Unavailable(error.to_string().into()));
                }
                return;
            }
        };
        for group in groups {
            for (at, item) in &group.items {
                let Ok(verdicts) = &mut board[group.request] else { break };
                let Some(told) = told.get(&(group.request, *at)) else { continue };
                // Forgotten since: its id is all that can be said.
                let gone = |id| Known { id, status: Status::Processed, result: None };
                verdicts[*at] = Some(match told {
                    Told::Accepted(id) => self.accepted(*id, item),
                    Told::Review(id) => Verdict::Review(*id),
                    Told::Promoted(id) => {
                        self.note_copy(*id, item);
                        self.wake(item);
                        Verdict::Accepted(*id)
                    }
                    Told::Duplicate(id) => match existing.get(id) {
                        Some(existing) => self.duplicate(existing, item),
                        None => Verdict::Duplicate(gone(*id)),
                    },
                    Told::Conflict(id) => Verdict::Conflict(
                        existing.get(id).map_or_else(|| gone(*id), |one| one.known.clone()),
                    ),
                    Told::Taken => continue,
                });
            }
        }
    }

    fn accepted(&self, id: EventId, item: &Item<'_>) -> Verdict {
        self.wake(item);
        let phase = |job: &NewJob| if job.hopeless.is_some() { Phase::Dead } else { Phase::Ready };
        let status = Status::of_jobs(item.jobs.iter().map(|job| (phase(job), 0)));
        let known = Known { id, status, result: None };
        self.remember(
            item.receipt,
            Recent { body_hash: item.receipt.body_hash(), known, review: None },
        );
        Verdict::Accepted(id)
    }

    fn duplicate(&self, existing: &Existing, item: &Item<'_>) -> Verdict {
        self.note_copy(existing.known.id, item);
        if existing.hash == item.receipt.key_hash() {
            self.remember(
                item.receipt,
                Recent {
                    body_hash: existing.body_hash,
                    known: existing.known.clone(),
                    review: existing.standing.waiting,
                },
            );
        }
        Verdict::Duplicate(existing.known.clone())
    }

    /// Only what cannot change any more answers from memory, and only within the epoch in which it
    /// was asked about.
    fn remember(&self, receipt: &Receipt, recent: Recent) {
        self.shared.remember(self.epoch.as_ref(), receipt.key_hash(), recent);
    }

    fn note_copy(&self, id: EventId, item: &Item<'_>) {
        self.shared.note_copy(id, item.via);
    }

    fn wake(&self, item: &Item<'_>) {
        if item.jobs.iter().any(|job| job.hopeless.is_none()) {
            self.shared.arrived.notify_waiters();
        }
    }

    async fn existing(&self, hashes: &[Uuid], ids: &[Uuid]) -> Result<Vec<Existing>, PgError> {
        if hashes.is_empty() && ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut lent = self.shared.pools.ingest.lend().await?;
        let rows = lent.query(include_str!("sql/known.sql"), &[&hashes, &ids]).await?;
        Ok(rows
            .iter()
            .map(|row| {
                let standing = Standing::new(row.get(3), row.get(4), row.get(5), row.get(6));
                let result: Option<&str> = row.get(7);
                let known = Known {
                    id: EventId(row.get(1)),
                    status: standing.status,
                    result: result.map(Arc::from),
                };
                Existing {
                    hash: hash_of(row.get(0)),
                    body_hash: hash_of(row.get(2)),
                    standing,
                    known,
                }
            })
            .collect())
    }
}

fn is_plain_copy(existing: &Existing, item: &Item<'_>) -> bool {
    let late = existing.standing.waiting == Some(hapax_core::store::ReviewReason::Late);
    existing.body_hash == item.receipt.body_hash() && !late
}

/// Receipts as columns, in the order in which they are decided.
#[derive(Default)]
struct Rows<'a> {
    ids: Vec<Uuid>,
    hashes: Vec<Uuid>,
    tenants: Vec<&'a str>,
    sources: Vec<&'a str>,
    event_ids: Vec<&'a [u8]>,
    event_types: Vec<Option<&'a [u8]>>,
    occurred_ats: Vec<Option<Timestamp>>,
    received_ats: Vec<Timestamp>,
    body_hashes: Vec<Uuid>,
    request_ids: Vec<Uuid>,
    remotes: Vec<Option<std::net::IpAddr>>,
    secrets: Vec<i32>,
    signed_ats: Vec<Option<Timestamp>>,
    headers: Vec<&'a [u8]>,
    bodies: Vec<&'a [u8]>,
    lates: Vec<bool>,
    guards: Vec<Option<Uuid>>,
    earliers: Vec<Option<Uuid>>,
    not_befores: Vec<Option<Timestamp>>,
    other_hashes: Vec<Option<Uuid>>,
    other_event_ids: Vec<Option<&'a [u8]>>,
    jobs: JobRows,
}

/// The jobs of all of them.
#[derive(Default)]
struct JobRows {
    rows: Vec<i32>,
    handlers: Vec<i32>,
    lanes: Vec<i32>,
    states: Vec<i16>,
    resources: Vec<Option<String>>,
    positions: Vec<Option<i64>>,
    errors: Vec<Option<String>>,
}

impl JobRows {
    fn columns(&self) -> [&(dyn ToSql + Sync); 7] {
        [
            &self.rows,
            &self.handlers,
            &self.lanes,
            &self.states,
            &self.resources,
            &self.positions,
            &self.errors,
        ]
    }
}

impl<'a> Rows<'a> {
    fn push(&mut self, item: &Item<'a>, lanes: &[LaneAt]) {
        let (receipt, via) = (item.receipt, item.via);
        let (key, other) = (receipt.key(), receipt.if_conflict());
        let (earlier, guard) = (receipt.earlier(), receipt.guard());
        self.ids.push(item.id.0);
        self.hashes.push(of_hash(receipt.key_hash()));
        self.tenants.push(key.tenant.as_str());
        self.sources.push(key.source.as_str());
        self.event_ids.push(key.event_id.as_bytes());
        self.event_types.push(receipt.event_type().map(str::as_bytes));
        self.occurred_ats.push(receipt.occurred_at().map(stamp));
        self.received_ats.push(via.received_at);
        self.body_hashes.push(of_hash(receipt.body_hash()));
        self.request_ids.push(via.request_id);
        self.remotes.push(via.remote);
        self.secrets.push(i32::try_from(via.secret).unwrap_or(i32::MAX));
        self.signed_ats.push(via.signed_at.map(stamp));
        self.headers.push(via.headers.as_bytes());
        self.bodies.push(receipt.body());
        self.lates.push(receipt.timeliness() != Timeliness::OnTime);
        self.guards.push(guard.map(of_hash));
        self.earliers.push(earlier.map(|earlier| of_hash(earlier.key.hash())));
        self.not_befores.push(earlier.map(|earlier| stamp(earlier.not_before)));
        self.other_hashes.push(other.map(|other| of_hash(other.hash())));
        self.other_event_ids.push(other.map(|other| other.event_id.as_bytes()));
        let row = self.ids.len() as i32;
        for (job, at) in item.jobs.iter().zip(lanes) {
            self.jobs.rows.push(row);
            self.jobs.handlers.push(at.handler);
            self.jobs.lanes.push(at.lane);
            self.jobs.states.push(if job.hopeless.is_some() { 4 } else { 0 });
            self.jobs.resources.push(job.place.as_ref().map(|place| text(&place.resource)));
            self.jobs.positions.push(job.place.as_ref().map(|place| place.position.0));
            self.jobs.errors.push(job.hopeless.as_deref().map(text));
        }
    }

    /// What every statement is told of the receipts.
    fn columns(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![
            &self.ids,
            &self.hashes,
            &self.tenants,
            &self.sources,
            &self.event_ids,
            &self.event_types,
            &self.occurred_ats,
            &self.received_ats,
            &self.body_hashes,
            &self.request_ids,
            &self.remotes,
            &self.secrets,
            &self.signed_ats,
            &self.headers,
            &self.bodies,
        ]
    }

    /// The short way: the ids that were new.
    async fn insert(
        &self,
        lent: &mut Lent,
        now: Option<Timestamp>,
    ) -> Result<HashSet<Uuid>, PgError> {
        const EVENTS: &str =
            concat!(include_str!("sql/insert_events.sql"), ") SELECT id FROM accepted");
        const EVENTS_AND_JOBS: &str = concat!(
            include_str!("sql/insert_events.sql"),
            include_str!("sql/insert_jobs.sql"),
            ") SELECT id FROM accepted"
        );
        if self.ids.is_empty() {
            return Ok(HashSet::new());
        }
        let mut told = self.columns();
        let rows = if self.jobs.rows.is_empty() {
            lent.query(EVENTS, &told).await?
        } else {
            told.extend(self.jobs.columns());
            told.push(&now);
            lent.query(EVENTS_AND_JOBS, &told).await?
        };
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// The long way: each row and what became of it.
    async fn ingest(
        &self,
        lent: &mut Lent,
        now: Option<Timestamp>,
    ) -> Result<Vec<(usize, Told)>, PgError> {
        let conflicts_max = CONFLICTS_IN_FULL as i64;
        let mut told = self.columns();
        told.extend([
            &self.lates as &(dyn ToSql + Sync),
            &self.guards,
            &self.earliers,
            &self.not_befores,
            &self.other_hashes,
            &self.other_event_ids,
        ]);
        told.extend(self.jobs.columns());
        told.extend([&conflicts_max as &(dyn ToSql + Sync), &now]);
        let rows = lent
            .query(
                "SELECT row_number, verdict, id FROM hapax.ingest($1, $2, $3, $4, $5, $6, $7, $8, \
                 $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, \
                 $25, $26, $27, $28, $29, $30)",
                &told,
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| {
                let (place, verdict, id): (i32, i16, Uuid) = (row.get(0), row.get(1), row.get(2));
                let id = EventId(id);
                let told = match verdict {
                    0 => Told::Accepted(id),
                    1 => Told::Duplicate(id),
                    2 => Told::Conflict(id),
                    3 => Told::Review(id),
                    4 => Told::Promoted(id),
                    _ => Told::Taken,
                };
                (place as usize - 1, told)
            })
            .collect())
    }
}
