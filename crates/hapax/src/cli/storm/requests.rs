//! Sends what a plan says, many requests at once, and keeps what was heard. Tries again where the
//! endpoint asks for it, as a sender would; judges nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::Timestamp;
use indicatif::ProgressBar;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::super::output::Failure;
use super::super::sender::{self, Answer, HttpClient, NoAnswer, Sender, Signed};
use super::plan::{Group, Plan, RequestKind};

/// How often a request is tried where each answer asks to come again.
const TRIES_MAX: usize = 8;

/// The longest wait between two tries, whatever the endpoint asks for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(5);

/// A copy is signed afresh when its signature is this old: well inside of every sender's window.
const SIGNED_FOR: i64 = 60;

/// What became of one request.
#[derive(Debug)]
pub(super) struct RequestOutcome {
    /// Its event's place in the plan.
    pub(super) event: usize,
    /// As what it was sent.
    pub(super) kind: RequestKind,
    /// The last answer, or why there was none.
    pub(super) answer: Result<Answer, NoAnswer>,
    /// Every answer on the way, the last one included.
    pub(super) tries: Vec<Try>,
}

/// One answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Try {
    pub(super) status: u16,
    pub(super) took: Duration,
}

/// The sending side of a storm.
pub(super) struct RequestSender {
    sender: Arc<Sender>,
    client: HttpClient,
    slots: Arc<Semaphore>,
}

impl RequestSender {
    pub(super) fn new(sender: Arc<Sender>, concurrency: u64) -> Self {
        let slots = usize::try_from(concurrency).unwrap_or(1);
        Self { sender, client: sender::client(), slots: Arc::new(Semaphore::new(slots)) }
    }

    /// Sends these groups of the plan in their order; stops early where not one connection can be made.
    pub(super) async fn send(
        &self,
        plan: &Plan,
        groups: &[Group],
        bar: &ProgressBar,
    ) -> Result<Vec<RequestOutcome>, Failure> {
        let mut outcomes = Vec::new();
        let mut running = JoinSet::new();
        let mut signed: HashMap<(usize, RequestKind), (Timestamp, Arc<Signed>)> = HashMap::new();
        for group in groups {
            let copies = u32::try_from(group.copies).unwrap_or(u32::MAX);
            let closed = |_| Failure::unreachable("the storm was broken off");
            let mut slots =
                Arc::clone(&self.slots).acquire_many_owned(copies).await.map_err(closed)?;
            while let Some(joined) = running.try_join_next() {
                outcomes.push(joined.map_err(task_failed)?);
            }
            if nothing_connected(&outcomes) {
                break;
            }
            let request = self.signed(plan, group, &mut signed)?;
            for _copy in 0..group.copies {
                let slot = slots.split(1);
                let (sender, client) = (Arc::clone(&self.sender), self.client.clone());
                let (request, bar, event) = (Arc::clone(&request), bar.clone(), group.event);
                let kind = group.kind;
                running.spawn(async move {
                    let (answer, tries) = deliver(&sender, &client, &request, kind).await;
                    bar.inc(1);
                    drop(slot);
                    RequestOutcome { event, kind, answer, tries }
                });
            }
        }
        while let Some(joined) = running.join_next().await {
            outcomes.push(joined.map_err(task_failed)?);
        }
        // By event and not by who was answered first: what is told of equal runs is equal.
        outcomes.sort_by_key(|outcome| outcome.event);
        Ok(outcomes)
    }

    /// All copies of an event are the same bytes with the same signature, as long as that is fresh.
    fn signed(
        &self,
        plan: &Plan,
        group: &Group,
        known: &mut HashMap<(usize, RequestKind), (Timestamp, Arc<Signed>)>,
    ) -> Result<Arc<Signed>, Failure> {
        let now = Timestamp::now();
        if let Some((at, signed)) = known.get(&(group.event, group.kind))
            && now.as_second() - at.as_second() < SIGNED_FOR
        {
            return Ok(Arc::clone(signed));
        }
        let event = &plan.events[group.event];
        let request = plan.request(&self.sender, event, group.kind, now)?;
        let signed = Arc::new(Signed { event_id: event.event_id.clone(), request });
        known.insert((group.event, group.kind), (now, Arc::clone(&signed)));
        Ok(signed)
    }
}

/// An endpoint to which not one connection could be made is a failure and no verdict; one that goes
/// away later is something that was heard.
pub(super) fn check_reached(outcomes: Vec<RequestOutcome>) -> Result<Vec<RequestOutcome>, Failure> {
    match outcomes.first().map(|first| &first.answer) {
        Some(Err(NoAnswer::CannotConnect(why))) if nothing_connected(&outcomes) => {
            Err(Failure::unreachable(format!("cannot connect: {why}")))
        }
        Some(_) | None => Ok(outcomes),
    }
}

async fn deliver(
    sender: &Sender,
    client: &HttpClient,
    request: &Arc<Signed>,
    kind: RequestKind,
) -> (Result<Answer, NoAnswer>, Vec<Try>) {
    let mut tries = Vec::new();
    loop {
        let started = Instant::now();
        let answer = sender.post(client, request).await;
        let Ok(said) = &answer else { return (answer, tries) };
        tries.push(Try { status: said.status, took: started.elapsed() });
        match retry_delay(kind, said) {
            Some(wait) if tries.len() < TRIES_MAX => tokio::time::sleep(wait).await,
            Some(_) | None => return (answer, tries),
        }
    }
}

/// After how long the endpoint wants this again, if it does. To what is to be refused a 4xx is an
/// answer, whatever else it says.
fn retry_delay(kind: RequestKind, answer: &Answer) -> Option<Duration> {
    let asks = match kind {
        RequestKind::Genuine => matches!(answer.status, 409 | 425 | 429 | 503),
        RequestKind::Stale
        | RequestKind::WrongSecret
        | RequestKind::ChangedBody
        | RequestKind::Unsigned => answer.status == 503,
    };
    answer.retry_after.filter(|_| asks).map(|wait| wait.min(RETRY_AFTER_MAX))
}

fn nothing_connected(outcomes: &[RequestOutcome]) -> bool {
    let cannot =
        |outcome: &RequestOutcome| matches!(outcome.answer, Err(NoAnswer::CannotConnect(_)));
    !outcomes.is_empty() && outcomes.iter().all(cannot)
}

fn task_failed(error: tokio::task::JoinError) -> Failure {
    Failure::unreachable(format!("a request broke down: {error}"))
}
