//! Reading one body: whole, within its cap, in time. A body that comes in one piece is handed on
//! without a copy and without a timer.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::limits::BodyLimits;

/// Why there is no body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyFault {
    /// Over the cap.
    TooLarge,
    /// Over its deadline, or below the lowest rate.
    Slow,
    /// Too many unfinished bodies are held already.
    Crowded,
    /// Its framing is wrong, or it broke off.
    Broken,
}

/// Memory for bodies that come in pieces, shared by all connections.
#[derive(Debug, Clone)]
pub(crate) struct Unfinished(Arc<Semaphore>);

impl Unfinished {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes_max.min(Semaphore::MAX_PERMITS))))
    }

    pub(crate) fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, BodyFault> {
        let bytes = u32::try_from(bytes).map_err(|_| BodyFault::Crowded)?;
        self.0.clone().try_acquire_many_owned(bytes).map_err(|_| BodyFault::Crowded)
    }
}

/// Reads `body` to its end.
pub(crate) async fn read<B>(
    mut body: B,
    limits: &BodyLimits,
    unfinished: &Unfinished,
) -> Result<Bytes, BodyFault>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut pace = Pace::new(limits);
    let first = match next(&mut body, &mut pace, 0).await? {
        Some(first) if first.len() > limits.bytes_max => return Err(BodyFault::TooLarge),
        Some(first) if body.is_end_stream() => return Ok(first),
        Some(first) => first,
        None => return Ok(Bytes::new()),
    };
    let Some(second) = next(&mut body, &mut pace, first.len()).await? else {
        return Ok(first);
    };
    let expected = body.size_hint().lower().try_into().unwrap_or(usize::MAX);
    let expected = expected.saturating_add(first.len() + second.len()).min(limits.bytes_max);
    let mut held = unfinished.take(expected)?;
    let mut whole = BytesMut::with_capacity(expected);
    whole.extend_from_slice(&first);
    drop(first);
    let mut piece = Some(second);
    while let Some(bytes) = piece {
        let total = whole.len() + bytes.len();
        if total > limits.bytes_max {
            return Err(BodyFault::TooLarge);
        }
        if total > held.num_permits() {
            held.merge(unfinished.take(total - held.num_permits())?);
        }
        whole.extend_from_slice(&bytes);
        piece = next(&mut body, &mut pace, total).await?;
    }
    Ok(whole.freeze())
}

/// The next bytes, or `None` at the end. Trailers say nothing we want.
async fn next<B>(
    body: &mut B,
    pace: &mut Pace<'_>,
    received: usize,
) -> Result<Option<Bytes>, BodyFault>
where
    B: Body<Data = Bytes> + Unpin,
{
    poll_fn(|cx| {
        loop {
            match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Ready(None) => return Poll::Ready(Ok(None)),
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Err(BodyFault::Broken)),
                Poll::Ready(Some(Ok(frame))) => match Frame::into_data(frame) {
                    Ok(bytes) if bytes.is_empty() => {}
                    Ok(bytes) => return Poll::Ready(Ok(Some(bytes))),
                    Err(_trailers) => {}
                },
                Poll::Pending => return pace.poll_overdue(cx, received).map(Err),
            }
        }
    })
    .await
}

/// Judges how fast a body comes.
struct Pace<'a> {
    limits: &'a BodyLimits,
    asked_once: bool,
    clock: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl<'a> Pace<'a> {
    fn new(limits: &'a BodyLimits) -> Self {
        Self { limits, asked_once: false, clock: None }
    }

    /// Ready once the body is overdue.
    fn poll_overdue(&mut self, cx: &mut Context<'_>, received: usize) -> Poll<BodyFault> {
        // hyper hands a body over only after it was first asked for, even where it lies in the
        // buffer already. So the first time costs no timer: we are simply asked again.
        if !self.asked_once {
            self.asked_once = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let limits = self.limits;
        let (began, timer) = self.clock.get_or_insert_with(|| {
            let began = Instant::now();
            (began, Box::pin(sleep_until(began + limits.grace.min(limits.deadline))))
        });
        while timer.as_mut().poll(cx).is_ready() {
            let elapsed = began.elapsed();
            let least =
                limits.bytes_per_second_min.saturating_mul(elapsed.as_millis() as u64) / 1000;
            if elapsed >= limits.deadline || (received as u64) < least {
                return Poll::Ready(BodyFault::Slow);
            }
            let look_again = elapsed + std::time::Duration::from_millis(500);
            timer.as_mut().reset(*began + look_again.min(limits.deadline));
        }
        Poll::Pending
    }
}
