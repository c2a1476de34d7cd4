//! Sends the requests of a plan concurrently and collects the answers. A request is retried when the
//! endpoint asks for that, as a sender would. The answers are judged in `judge.rs`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::Timestamp;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::StormError;
use crate::plan::{Group, RequestKind, StormPlan};
use crate::sender::{HttpClient, NoAnswer, RequestAnswer, Sender, SignedRequest, http_client};

/// Called after each request.
pub type Progress = Arc<dyn Fn() + Send + Sync>;

/// The most attempts of one request.
const TRIES_MAX: usize = 8;

/// The longest wait between two attempts, whatever Retry-After asks for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(5);

/// After this many seconds a copy is signed again, well inside the window of every sender.
const SIGNED_FOR: i64 = 60;

/// The outcome of one request.
#[derive(Debug)]
pub struct RequestOutcome {
    /// The index of the event in the plan.
    pub event: usize,
    /// How it was sent.
    pub kind: RequestKind,
    /// The last answer, or the reason for none.
    pub answer: Result<RequestAnswer, NoAnswer>,
    /// Every answer, including the last.
    pub tries: Vec<AnsweredAttempt>,
}

/// One attempt that was answered.
#[derive(Debug, Clone, Copy)]
pub struct AnsweredAttempt {
    /// The HTTP status.
    pub status: u16,
    /// From the start of the request to the end of the answer.
    pub took: Duration,
}

/// Sends requests with bounded concurrency.
pub struct RequestSender {
    sender: Arc<Sender>,
    client: HttpClient,
    slots: Arc<Semaphore>,
}

impl RequestSender {
    /// Sends at most `concurrency` requests at once.
    pub fn new(sender: Arc<Sender>, concurrency: u64) -> Self {
        let slots = usize::try_from(concurrency).unwrap_or(1);
        Self { sender, client: http_client(), slots: Arc::new(Semaphore::new(slots)) }
    }

    /// Sends these groups of the plan in order; stops early if no connection succeeds.
    pub async fn send(
        &self,
        plan: &StormPlan,
        groups: &[Group],
        progress: &Progress,
    ) -> Result<Vec<RequestOutcome>, StormError> {
        let mut outcomes = Vec::new();
        let mut running = JoinSet::new();
        let mut signed: HashMap<(usize, RequestKind), (Timestamp, Arc<SignedRequest>)> =
            HashMap::new();
        for group in groups {
            let copies = u32::try_from(group.copies).unwrap_or(u32::MAX);
            let closed = |_| StormError::unreachable("the storm was interrupted");
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
                let (request, progress) = (Arc::clone(&request), Arc::clone(progress));
                let (event, kind) = (group.event, group.kind);
                running.spawn(async move {
                    let (answer, tries) = deliver(&sender, &client, &request, kind).await;
                    progress();
                    drop(slot);
                    RequestOutcome { event, kind, answer, tries }
                });
            }
        }
        while let Some(joined) = running.join_next().await {
            outcomes.push(joined.map_err(task_failed)?);
        }
        // The results are sorted by event and not by arrival, so that equal runs print equal reports.
        outcomes.sort_by_key(|outcome| outcome.event);
        Ok(outcomes)
    }

    /// The signed request of an event. All copies share it until the signature is too old.
    fn signed(
        &self,
        plan: &StormPlan,
        group: &Group,
        known: &mut HashMap<(usize, RequestKind), (Timestamp, Arc<SignedRequest>)>,
    ) -> Result<Arc<SignedRequest>, StormError> {
        let now = Timestamp::now();
        if let Some((at, signed)) = known.get(&(group.event, group.kind))
            && now.as_second() - at.as_second() < SIGNED_FOR
        {
            return Ok(Arc::clone(signed));
        }
        let event = &plan.events[group.event];
        let request = plan.request(&self.sender, event, group.kind, now)?;
        let signed = Arc::new(SignedRequest { event_id: event.event_id.clone(), request });
        known.insert((group.event, group.kind), (now, Arc::clone(&signed)));
        Ok(signed)
    }
}

/// Fails if no connection to the endpoint succeeded. If the endpoint becomes unreachable later, the
/// storm is still judged.
pub fn check_reached(outcomes: Vec<RequestOutcome>) -> Result<Vec<RequestOutcome>, StormError> {
    match outcomes.first().map(|first| &first.answer) {
        Some(Err(NoAnswer::CannotConnect(why))) if nothing_connected(&outcomes) => {
            Err(StormError::unreachable(format!("cannot connect: {why}")))
        }
        Some(_) | None => Ok(outcomes),
    }
}

async fn deliver(
    sender: &Sender,
    client: &HttpClient,
    request: &Arc<SignedRequest>,
    kind: RequestKind,
) -> (Result<RequestAnswer, NoAnswer>, Vec<AnsweredAttempt>) {
    let mut tries = Vec::new();
    loop {
        let started = Instant::now();
        let answer = sender.post(client, request).await;
        let Ok(answered) = &answer else { return (answer, tries) };
        tries.push(AnsweredAttempt { status: answered.status, took: started.elapsed() });
        match retry_delay(kind, answered) {
            Some(wait) if tries.len() < TRIES_MAX => tokio::time::sleep(wait).await,
            Some(_) | None => return (answer, tries),
        }
    }
}

/// How long to wait before a retry, if the endpoint asks for one. For a request that must be rejected, a
/// 4xx is final.
fn retry_delay(kind: RequestKind, answer: &RequestAnswer) -> Option<Duration> {
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

fn task_failed(error: tokio::task::JoinError) -> StormError {
    StormError::unreachable(format!("a request task panicked: {error}"))
}
