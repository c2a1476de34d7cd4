//! The two skins around a socket: [`Lingering`], next to it, which closes so that a last answer
//! arrives; and [`Watched`], next to hyper, which gives heads and unread answers a deadline.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::head::FramingWatch;

/// What a connection's skins and its service tell each other.
#[derive(Debug)]
pub(crate) struct Flight {
    running: AtomicUsize,
    started: AtomicUsize,
    /// The first request, counted from 0, that two readers could understand differently.
    ambiguous_from: AtomicUsize,
    unread: AtomicBool,
}

impl Default for Flight {
    fn default() -> Self {
        Self {
            running: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            ambiguous_from: AtomicUsize::new(usize::MAX),
            unread: AtomicBool::new(false),
        }
    }
}

/// One request on its way; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<Flight>);

impl Flight {
    /// A request's head is complete. Says also whether that head was ambiguous.
    pub(crate) fn begin(self: &Arc<Self>) -> (InFlight, bool) {
        self.running.fetch_add(1, Ordering::Relaxed);
        let nth = self.started.fetch_add(1, Ordering::Relaxed);
        (InFlight(self.clone()), nth >= self.ambiguous_from.load(Ordering::Relaxed))
    }

    /// How many requests there have been, and whether one is running.
    pub(crate) fn activity(&self) -> (usize, bool) {
        (self.started.load(Ordering::Relaxed), self.running.load(Ordering::Relaxed) > 0)
    }

    /// The connection will end with bytes of the peer unread.
    pub(crate) fn leaves_bytes_unread(&self) {
        self.unread.store(true, Ordering::Relaxed);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A socket that, where the peer may still be sending, reads on for a while after its last byte.
#[derive(Debug)]
pub(crate) struct Lingering<T> {
    socket: T,
    flight: Arc<Flight>,
    span: Duration,
    bytes_left: usize,
    shut: bool,
    deadline: Deadline,
}

impl<T> Lingering<T> {
    pub(crate) fn new(socket: T, flight: Arc<Flight>, span: Duration, bytes_max: usize) -> Self {
        let deadline = Deadline::default();
        Self { socket, flight, span, bytes_left: bytes_max, shut: false, deadline }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Lingering<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buf)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Lingering<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.shut {
            ready!(Pin::new(&mut this.socket).poll_shutdown(cx))?;
            this.shut = true;
        }
        if !this.flight.unread.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let mut scratch = [0; 8 * 1024];
        while this.bytes_left > 0 {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut this.socket).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if buf.filled().is_empty() => break,
                Poll::Ready(Ok(())) => {
                    this.bytes_left = this.bytes_left.saturating_sub(buf.filled().len());
                }
                Poll::Ready(Err(_)) => break,
                Poll::Pending => return this.deadline.poll_within(cx, this.span).map(Ok),
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Which protocol a connection speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

/// A stream whose peer must finish each HTTP/1 head in time and must read what we send.
#[derive(Debug)]
pub(crate) struct Watched<T> {
    stream: T,
    protocol: Protocol,
    flight: Arc<Flight>,
    /// Bytes read before it was known which protocol this is.
    first: FirstBytes,
    first_taken: usize,
    framing: FramingWatch,
    /// The value of `flight.started` when the deadline of the head was set.
    head_of: usize,
    head_span: Duration,
    head_deadline: Deadline,
    stall_span: Duration,
    stall_deadline: Deadline,
}

/// The first bytes of a connection, and how many there are.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FirstBytes {
    pub(crate) bytes: [u8; 24],
    pub(crate) len: usize,
}

impl<T> Watched<T> {
    /// `head_by` is when the first head must be complete.
    pub(crate) fn new(
        stream: T,
        protocol: Protocol,
        flight: Arc<Flight>,
        first: FirstBytes,
        head_by: Instant,
        head_span: Duration,
        stall_span: Duration,
    ) -> Self {
        Self {
            stream,
            protocol,
            flight,
            first,
            first_taken: 0,
            framing: FramingWatch::default(),
            head_of: 0,
            head_span,
            head_deadline: Deadline { at: Some(head_by), timer: None },
            stall_span,
            stall_deadline: Deadline::default(),
        }
    }

    /// Notes what was read, before the parser has it.
    fn saw(&mut self, bytes: &[u8]) {
        if self.protocol == Protocol::Http2 {
            return;
        }
        self.framing.feed(bytes);
        if let Some(nth) = self.framing.ambiguous_from() {
            self.flight.ambiguous_from.store(nth, Ordering::Relaxed);
        }
    }

    fn begin_head_of(&mut self, started: usize) {
        if self.head_of != started {
            self.head_of = started;
            self.head_deadline.clear();
        }
    }

    /// Nothing to read now: is a head overdue?
    fn wait_for_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.protocol == Protocol::Http2 {
            return Poll::Pending;
        }
        let (started, running) = self.flight.activity();
        self.begin_head_of(started);
        if running || !(self.framing.is_in_head() || self.head_deadline.is_set()) {
            return Poll::Pending;
        }
        ready!(self.head_deadline.poll_within(cx, self.head_span));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the request head is overdue")))
    }

    fn wait_for_peer<R>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<R>> {
        ready!(self.stall_deadline.poll_within(cx, self.stall_span));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer reads nothing")))
    }

    fn progress<R>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        match polled {
            Poll::Pending => self.wait_for_peer(cx),
            Poll::Ready(done) => {
                self.stall_deadline.clear();
                Poll::Ready(done)
            }
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Watched<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.first_taken < this.first.len {
            let FirstBytes { bytes, len } = this.first;
            let part = &bytes[this.first_taken..len];
            let part = &part[..part.len().min(buf.remaining())];
            buf.put_slice(part);
            this.first_taken += part.len();
            this.saw(part);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Ready(Ok(())) => {
                this.saw(&buf.filled()[before..]);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => this.wait_for_head(cx),
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Watched<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.progress(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.progress(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.progress(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A head that never became a request: it was refused, and its peer may be sending on.
        let (started, _) = self.flight.activity();
        if self.framing.heads() > started {
            self.flight.leaves_bytes_unread();
        }
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.progress(cx, polled)
    }
}

/// A point in time that is set when waiting begins. The timer is made once and kept.
#[derive(Debug, Default)]
struct Deadline {
    at: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Deadline {
    fn is_set(&self) -> bool {
        self.at.is_some()
    }

    fn clear(&mut self) {
        self.at = None;
    }

    /// Ready once the deadline has passed; where none is set, it is `span` from now.
    fn poll_within(&mut self, cx: &mut Context<'_>, span: Duration) -> Poll<()> {
        let at = *self.at.get_or_insert_with(|| Instant::now() + span);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        timer.as_mut().poll(cx)
    }
}
