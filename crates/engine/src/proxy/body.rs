//! Bodies that pass through a proxy, in both directions: piece by piece, each with a time limit.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hapax_layer::BoxError;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use crate::http::body::BodyFault;
use crate::http::body_memory::BodyPermit;

/// How a client's body is read.
#[derive(Debug)]
pub(super) enum UploadMode {
    /// Buffered in memory until the request is answered. The duration is the time for the whole
    /// body, which shares the memory for bodies with others.
    Whole(Duration, BodyPermit),
    /// Forwarded at once, and of any length. The duration is the time for each piece.
    InPieces(Duration),
}

/// A client's body.
pub(super) struct Uploaded<B> {
    body: B,
    /// The time for the whole body, or for each piece.
    span: Duration,
    in_pieces: bool,
    /// Set only while the body has to be waited for.
    timer: Option<Pin<Box<Sleep>>>,
    course: Arc<UploadState>,
}

/// The result of reading a client's body, for the code that forwarded it. A complete body stays in
/// memory with its reader, so the memory is freed when this value is dropped and not with the body.
pub(super) struct Upload(Arc<UploadState>);

#[derive(Debug)]
struct UploadState {
    state: AtomicU8,
    /// The memory that a buffered body holds.
    held: Mutex<Option<BodyPermit>>,
}

/// The result of reading a client's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UploadResult {
    /// The body was not read to its end.
    Unread,
    /// The body was read to its end.
    Ended,
    /// The body took too long.
    Slow,
    /// Too many unfinished bodies are in memory already.
    Crowded,
}

impl UploadResult {
    const ALL: [Self; 4] = [Self::Unread, Self::Ended, Self::Slow, Self::Crowded];
}

impl Upload {
    pub(super) fn state(&self) -> UploadResult {
        UploadResult::ALL[usize::from(self.0.state.load(Ordering::Acquire))]
    }
}

impl<B: Body> Uploaded<B> {
    pub(super) fn new(body: B, taken: UploadMode) -> (Self, Upload) {
        let state = if body.is_end_stream() { UploadResult::Ended } else { UploadResult::Unread };
        let state = AtomicU8::new(state as u8);
        let (span, held) = match taken {
            UploadMode::Whole(span, held) => (span, Some(held)),
            UploadMode::InPieces(span) => (span, None),
        };
        let in_pieces = held.is_none();
        let course = Arc::new(UploadState { state, held: Mutex::new(held) });
        let upload = Upload(Arc::clone(&course));
        (Self { body, span, in_pieces, timer: None, course }, upload)
    }

    fn is_now(&self, state: UploadResult) {
        self.course.state.store(state as u8, Ordering::Release);
    }

    /// Counts a piece that is not the last.
    fn hold(&mut self, frame: &Frame<Bytes>) -> Result<(), BodyFault>
    where
        B: Body<Data = Bytes>,
    {
        if self.in_pieces {
            self.timer = None;
            return Ok(());
        }
        let mut held = self.course.held();
        let Some(held) = &mut *held else { return Ok(()) };
        let total = held.bytes() + frame.data_ref().map_or(0, Bytes::len);
        held.grow_to(total)?;
        held.received(total);
        Ok(())
    }
}

impl UploadState {
    fn held(&self) -> MutexGuard<'_, Option<BodyPermit>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B> Body for Uploaded<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) if !this.body.is_end_stream() => match this.hold(&frame) {
                Ok(()) => Poll::Ready(Some(Ok(frame))),
                Err(_) => {
                    this.is_now(UploadResult::Crowded);
                    Poll::Ready(Some(Err(late())))
                }
            },
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(last) => {
                this.is_now(UploadResult::Ended);
                if let Some(held) = &*this.course.held() {
                    held.is_whole();
                }
                Poll::Ready(last.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => {
                let gave_way = this.course.held().as_ref().map(|held| held.poll_gave_way(cx));
                if gave_way.is_some_and(|gave_way| gave_way.is_ready()) {
                    this.is_now(UploadResult::Crowded);
                    return Poll::Ready(Some(Err(late())));
                }
                let span = this.span;
                let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(span)));
                ready!(timer.as_mut().poll(cx));
                this.is_now(UploadResult::Slow);
                Poll::Ready(Some(Err(late())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An upstream's answer: the part that was read already, then the rest as it arrives.
pub(super) struct UpstreamBody {
    first: Option<Bytes>,
    rest: Option<Incoming>,
    by: Option<Pin<Box<Sleep>>>,
}

impl UpstreamBody {
    /// A complete answer.
    pub(super) fn whole(body: impl Into<Bytes>) -> Self {
        let body = body.into();
        Self { first: (!body.is_empty()).then_some(body), rest: None, by: None }
    }

    /// An answer that is streamed, for as long as it takes.
    pub(super) fn streamed(body: Incoming) -> Self {
        Self { first: None, rest: Some(body), by: None }
    }

    /// The first part of an answer, and the rest as it arrives until `by`.
    pub(super) fn begun(first: Bytes, rest: Incoming, by: Instant) -> Self {
        Self { first: Some(first), rest: Some(rest), by: Some(Box::pin(sleep_until(by))) }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let this = &mut *self;
        let Some(rest) = &mut this.rest else { return Poll::Ready(None) };
        match (Pin::new(rest).poll_frame(cx), &mut this.by) {
            (Poll::Ready(frame), _) => Poll::Ready(frame.map(|frame| frame.map_err(Into::into))),
            (Poll::Pending, None) => Poll::Pending,
            (Poll::Pending, Some(by)) => by.as_mut().poll(cx).map(|()| Some(Err(late()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().map_or(0, Bytes::len) as u64;
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        let mut whole = SizeHint::new();
        whole.set_lower(first + rest.lower());
        if let Some(upper) = rest.upper() {
            whole.set_upper(first + upper);
        }
        whole
    }
}

fn late() -> BoxError {
    io::Error::new(io::ErrorKind::TimedOut, "the body took too long").into()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::net::Ipv4Addr;

    use http_body_util::BodyExt as _;

    use super::*;
    use crate::http::body_memory::BodyMemory;

    /// A body that consists of these pieces, all available at once.
    struct Pieces(VecDeque<&'static [u8]>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
            Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(Bytes::from_static(piece)))))
        }

        fn is_end_stream(&self) -> bool {
            self.0.is_empty()
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    async fn read(taken: UploadMode, pieces: &[&'static [u8]]) -> (Option<Bytes>, UploadResult) {
        let (body, upload) = Uploaded::new(Pieces(pieces.iter().copied().collect()), taken);
        let read = body.collect().await.ok().map(|read| read.to_bytes());
        (read, upload.state())
    }

    #[tokio::test]
    async fn buffered_bodies_share_the_memory_and_free_it() {
        let unfinished = BodyMemory::new(10, LONG);
        let whole = || UploadMode::Whole(LONG, unfinished.hold(Ipv4Addr::LOCALHOST.into()));
        let fits = (Some(Bytes::from_static(b"aaaaabbbbbccccc")), UploadResult::Ended);
        // The last piece is not counted, because the body is then complete.
        assert_eq!(read(whole(), &[b"aaaaa", b"bbbbb", b"ccccc"]).await, fits);
        assert_eq!(
            read(whole(), &[b"aaaaaa", b"bbbbbb", b"cc"]).await,
            (None, UploadResult::Crowded)
        );
        assert_eq!(read(whole(), &[b"aaaaa", b"bbbbb", b"ccccc"]).await, fits);
        assert_eq!(read(UploadMode::InPieces(LONG), &[b"aaaaa", b"bbbbb", b"ccccc"]).await, fits);
        assert_eq!(read(whole(), &[]).await, (Some(Bytes::new()), UploadResult::Ended));
    }

    #[tokio::test]
    async fn the_memory_of_a_body_is_held_until_its_request_is_answered() {
        // A complete body still takes memory for as long as a slow upstream needs.
        let unfinished = BodyMemory::new(10, LONG);
        let whole = || UploadMode::Whole(LONG, unfinished.hold(Ipv4Addr::LOCALHOST.into()));
        let (body, running) = Uploaded::new(Pieces([&b"aaaaaa"[..], b"b"].into()), whole());
        drop(body.collect().await.unwrap());
        assert_eq!(running.state(), UploadResult::Ended);
        assert_eq!(read(whole(), &[b"cccccc", b"d"]).await, (None, UploadResult::Crowded));
        drop(running);
        assert_eq!(read(whole(), &[b"cccccc", b"d"]).await.1, UploadResult::Ended);
    }

    #[test]
    fn every_state_survives_its_encoding() {
        assert!(UploadResult::ALL.into_iter().enumerate().all(|(at, state)| state as usize == at));
    }
}
