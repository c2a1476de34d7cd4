//! Bodies on their way through a proxy, in both directions: piece by piece, and never for longer than
//! they may take.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_layer::BoxError;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// How long a client may take for its body.
#[derive(Debug, Clone, Copy)]
pub(super) enum Patience {
    /// For all of it: somebody holds it in memory until it is whole.
    InAll(Duration),
    /// For each piece: it is passed on at once, and may be as long as it likes.
    ForEachPiece(Duration),
}

/// A client's body.
pub(super) struct Uploaded<B> {
    body: B,
    patience: Patience,
    /// Only where it had to be waited for.
    timer: Option<Pin<Box<Sleep>>>,
    ended: Arc<AtomicBool>,
}

/// What became of a client's body, for the one who gave it away.
pub(super) struct Upload(Arc<AtomicBool>);

impl Upload {
    /// Whether it was read to its end.
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl<B: Body> Uploaded<B> {
    pub(super) fn new(body: B, patience: Patience) -> (Self, Upload) {
        let ended = Arc::new(AtomicBool::new(body.is_end_stream()));
        let upload = Upload(Arc::clone(&ended));
        (Self { body, patience, timer: None, ended }, upload)
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
            Poll::Ready(frame) => {
                if frame.is_none() || this.body.is_end_stream() {
                    this.ended.store(true, Ordering::Release);
                }
                match this.patience {
                    Patience::InAll(_) => {}
                    Patience::ForEachPiece(_) => this.timer = None,
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => {
                let (Patience::InAll(span) | Patience::ForEachPiece(span)) = this.patience;
                let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(span)));
                timer.as_mut().poll(cx).map(|()| Some(Err(late())))
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

/// An upstream's answer: what was read of it already, then the rest as it comes.
pub(super) struct Answered {
    first: Option<Bytes>,
    rest: Option<Incoming>,
    by: Option<Pin<Box<Sleep>>>,
}

impl Answered {
    /// All of it.
    pub(super) fn whole(body: impl Into<Bytes>) -> Self {
        let body = body.into();
        Self { first: (!body.is_empty()).then_some(body), rest: None, by: None }
    }

    /// As it comes, for as long as it takes.
    pub(super) fn streamed(body: Incoming) -> Self {
        Self { first: None, rest: Some(body), by: None }
    }

    /// Its beginning, and the rest as it comes until then.
    pub(super) fn begun(first: Bytes, rest: Incoming, by: Instant) -> Self {
        Self { first: Some(first), rest: Some(rest), by: Some(Box::pin(sleep_until(by))) }
    }
}

impl Body for Answered {
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
