//! Reads one body completely, within its size limit and its deadlines. A body that arrives in one
//! piece needs no timer, and a long one no copy.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::http::body_memory::BodyPermit;
use crate::limits::BodyLimits;

/// The longest body in one piece that is copied: half of a connection's first read buffer.
const COPIED_BYTES_MAX: usize = 4 << 10;

/// Why a body could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyFault {
    /// Larger than the limit.
    TooLarge,
    /// The body is past its deadline, or slower than the lowest rate.
    Slow,
    /// Memory for unfinished bodies is short, and this is the slowest of them.
    Crowded,
    /// The framing is wrong, or the body ended early.
    Broken,
}

/// Reads `body` to its end. `held` counts the memory that the unfinished body takes.
pub(crate) async fn read<B>(
    mut body: B,
    limits: &BodyLimits,
    mut held: BodyPermit,
) -> Result<Bytes, BodyFault>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut pace = Pace::new(limits);
    let first = match next(&mut body, &mut pace, &held, 0).await? {
        Some(first) if first.len() > limits.bytes_max => return Err(BodyFault::TooLarge),
        Some(first) if body.is_end_stream() => return Ok(copy_if_short(first)),
        Some(first) => first,
        None => return Ok(Bytes::new()),
    };
    let mut piece = match poll_fn(|cx| Poll::Ready(poll_piece(&mut body, cx))).await {
        Poll::Ready(second) => match second? {
            None => return Ok(copy_if_short(first)),
            Some(second) => Some(second),
        },
        Poll::Pending => None,
    };
    // The body comes in pieces: from here on its bytes are copied, and their memory is counted.
    let mut whole = Vec::new();
    take(&mut whole, &first, &body, limits, &mut held)?;
    drop(first);
    loop {
        if let Some(bytes) = piece {
            take(&mut whole, &bytes, &body, limits, &mut held)?;
        }
        piece = next(&mut body, &mut pace, &held, whole.len()).await?;
        if piece.is_none() {
            return Ok(whole.into());
        }
    }
}

/// Copies a short body out of its connection's buffer. A piece is a slice of that buffer and keeps all of it, for as
/// long as the body waits for its commit.
fn copy_if_short(piece: Bytes) -> Bytes {
    if piece.len() <= COPIED_BYTES_MAX { Bytes::copy_from_slice(&piece) } else { piece }
}

/// Adds a piece to the body. The buffer grows with the bytes received, whatever length was
/// declared.
fn take<B>(
    whole: &mut Vec<u8>,
    piece: &[u8],
    body: &B,
    limits: &BodyLimits,
    held: &mut BodyPermit,
) -> Result<(), BodyFault>
where
    B: Body,
{
    let total = whole.len() + piece.len();
    if total > limits.bytes_max {
        return Err(BodyFault::TooLarge);
    }
    if total > whole.capacity() {
        let declared = body.size_hint().upper().and_then(|rest| usize::try_from(rest).ok());
        let declared = declared.map_or(usize::MAX, |rest| total.saturating_add(rest));
        let room = total.saturating_mul(2).min(declared).min(limits.bytes_max).max(total);
        held.grow_to(room)?;
        whole.reserve_exact(room - whole.len());
    }
    whole.extend_from_slice(piece);
    held.received(total);
    Ok(())
}

/// The next bytes, or `None` at the end of the body.
async fn next<B>(
    body: &mut B,
    pace: &mut Pace<'_>,
    held: &BodyPermit,
    received: usize,
) -> Result<Option<Bytes>, BodyFault>
where
    B: Body<Data = Bytes> + Unpin,
{
    poll_fn(|cx| match poll_piece(body, cx) {
        Poll::Ready(piece) => Poll::Ready(piece),
        Poll::Pending => match held.poll_gave_way(cx) {
            Poll::Ready(()) => Poll::Ready(Err(BodyFault::Crowded)),
            Poll::Pending => pace.poll_overdue(cx, received).map(Err),
        },
    })
    .await
}

/// The next piece. Trailers are dropped: no scheme uses them.
fn poll_piece<B>(body: &mut B, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, BodyFault>>
where
    B: Body<Data = Bytes> + Unpin,
{
    loop {
        match ready!(Pin::new(&mut *body).poll_frame(cx)) {
            None => return Poll::Ready(Ok(None)),
            Some(Err(_)) => return Poll::Ready(Err(BodyFault::Broken)),
            Some(Ok(frame)) => match Frame::into_data(frame) {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => return Poll::Ready(Ok(Some(bytes))),
                Err(_trailers) => {}
            },
        }
    }
}

/// Measures how fast a body arrives.
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
        // hyper delivers a body only after a first poll, even if the body is already in the buffer.
        // Therefore the first poll sets no timer and asks to be polled again.
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
