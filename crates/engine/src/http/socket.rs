//! The two wrappers of a socket. [`DrainingSocket`], next to the socket, closes it so that the last
//! answer arrives. [`WatchedStream`], next to hyper, sets deadlines for heads and unread answers and
//! checks the bytes that the peer sends.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{self, Sleep, sleep_until};

use crate::http::client_address::party;
use crate::http::connections::ConnectionState;
use crate::http::http2_frames::FrameWatch;
use crate::http::smuggling_guard::FramingWatch;
use crate::limits::{NEW_FOR, SLOW_AFTER};

/// The state of one connection, shared by its wrappers, its service and the accept loop.
#[derive(Debug)]
pub(crate) struct ConnectionActivity {
    opened: Instant,
    running: AtomicUsize,
    started: AtomicUsize,
    /// The beginnings of the bodies that are still to come, in microseconds after `opened`, the
    /// oldest first.
    bodies: Mutex<Vec<u64>>,
    /// The number of running requests whose answer is ready but not yet fully sent.
    answered: AtomicUsize,
    /// The time at which a part of an answer was last sent, in microseconds after `opened`.
    taken_us: AtomicU64,
    /// The last time at which a request began while none was running, or at which a request ended,
    /// in microseconds after `opened`.
    changed_us: AtomicU64,
    /// The time since which the peer has left bytes unread, in microseconds after `opened`; 0 while
    /// it reads.
    stalled_us: AtomicU64,
    verified: AtomicBool,
    /// The connection has ended or is being closed; its slot is free or will be soon.
    gone: AtomicBool,
    /// The first request, counted from 0, that two parsers could read differently.
    ambiguous_from: AtomicUsize,
    unread: AtomicBool,
    peer: IpAddr,
    is_forwarded: AtomicBool,
    /// The client of the last request, if a trusted proxy named one.
    client: Mutex<IpAddr>,
}

/// One request in flight; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    activity: Arc<ConnectionActivity>,
    is_answered: bool,
}

/// One body in flight; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Reading {
    activity: Arc<ConnectionActivity>,
    began_us: u64,
}

impl ConnectionActivity {
    pub(crate) fn new(peer: SocketAddr) -> Self {
        let peer = party(peer.ip().to_canonical());
        Self {
            opened: Instant::now(),
            running: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            bodies: Mutex::default(),
            answered: AtomicUsize::new(0),
            taken_us: AtomicU64::new(0),
            changed_us: AtomicU64::new(0),
            stalled_us: AtomicU64::new(0),
            verified: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            ambiguous_from: AtomicUsize::new(usize::MAX),
            unread: AtomicBool::new(false),
            peer,
            is_forwarded: AtomicBool::new(false),
            client: Mutex::new(peer),
        }
    }

    /// Records that the head of a request is complete. Also returns whether that head was
    /// ambiguous.
    pub(crate) fn begin(self: &Arc<Self>) -> (InFlight, bool) {
        if self.running.fetch_add(1, Ordering::Relaxed) == 0 {
            self.changed_us.store(self.age_us(), Ordering::Relaxed);
        }
        let nth = self.started.fetch_add(1, Ordering::Relaxed);
        let in_flight = InFlight { activity: self.clone(), is_answered: false };
        (in_flight, nth >= self.ambiguous_from.load(Ordering::Relaxed))
    }

    /// Records that the body of a running request is still to come.
    pub(crate) fn reads(self: &Arc<Self>) -> Reading {
        let mut bodies = self.bodies();
        // Read under the lock, so that the order is right.
        let began_us = self.age_us();
        bodies.push(began_us);
        Reading { activity: self.clone(), began_us }
    }

    fn bodies(&self) -> MutexGuard<'_, Vec<u64>> {
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a request of this connection was verified.
    pub(crate) fn has_verified(&self) {
        self.verified.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_verified(&self) -> bool {
        self.verified.load(Ordering::Relaxed)
    }

    /// Records that the connection ends. This happens before its slot is free, so that no
    /// connection is closed for a slot that was already given away.
    pub(crate) fn record_end(&self) {
        self.gone.store(true, Ordering::Release);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    #[cfg(test)]
    pub(crate) fn comes_back(&self) {
        self.gone.store(false, Ordering::Release);
    }

    /// Records the client of the last request.
    pub(crate) fn is_for(&self, client: IpAddr) {
        let client = party(client);
        if client != self.peer || self.is_forwarded.load(Ordering::Relaxed) {
            self.is_forwarded.store(true, Ordering::Relaxed);
            *self.client.lock().unwrap_or_else(PoisonError::into_inner) = client;
        }
    }

    /// The address that this connection counts for.
    pub(crate) fn client(&self) -> IpAddr {
        match self.is_forwarded.load(Ordering::Relaxed) {
            true => *self.client.lock().unwrap_or_else(PoisonError::into_inner),
            false => self.peer,
        }
    }

    /// The beginning of its oldest unfinished body. Without one, the time at which its state last
    /// changed. Other requests of an HTTP/2 connection do not make a slow body younger.
    pub(crate) fn waits_since(&self) -> Instant {
        let body = self.bodies().first().copied();
        let since_us = body.unwrap_or_else(|| self.changed_us.load(Ordering::Relaxed));
        self.opened + Duration::from_micros(since_us)
    }

    /// The state of the connection, or `None` while it runs a complete request.
    pub(crate) fn state(&self, now: Instant) -> Option<ConnectionState> {
        let running = self.running.load(Ordering::Relaxed);
        let waits_for = now.saturating_duration_since(self.waits_since());
        let (is_slow, is_new) = (waits_for >= SLOW_AFTER, waits_for < NEW_FOR);
        let is_verified = self.is_verified();
        if running == 0 {
            // The last bytes of an answer may still be in flight. Only verified senders get this
            // exception: any other client could keep all of its connections by sending many
            // requests.
            if is_verified && (is_new || self.is_stalling() && !self.is_stalled(now)) {
                return None;
            }
            let has_asked = self.started.load(Ordering::Relaxed) > 0;
            return Some(match (is_verified, has_asked) {
                (true, _) => ConnectionState::VerifiedIdle,
                (false, true) => ConnectionState::Idle,
                (false, false) if is_slow => ConnectionState::SlowHead,
                (false, false) if is_new => ConnectionState::New,
                (false, false) => ConnectionState::Head,
            });
        }
        let is_reading = self.bodies().len() >= running;
        match (is_reading, is_verified) {
            (true, false) if is_slow => Some(ConnectionState::SlowBody),
            (true, false) if is_new => Some(ConnectionState::New),
            (true, false) => Some(ConnectionState::Body),
            (true, true) => is_slow.then_some(ConnectionState::VerifiedSlow),
            (false, false) => self.is_left(now, running).then_some(ConnectionState::SlowBody),
            (false, true) => self.is_left(now, running).then_some(ConnectionState::VerifiedSlow),
        }
    }

    /// Whether every running request is answered, and the peer has not read its answers for a long
    /// time.
    fn is_left(&self, now: Instant, running: usize) -> bool {
        let taken = self.opened + Duration::from_micros(self.taken_us.load(Ordering::Relaxed));
        let is_untaken = self.answered.load(Ordering::Relaxed) >= running
            && now.saturating_duration_since(taken) >= SLOW_AFTER;
        is_untaken || self.is_stalled(now)
    }

    /// Whether the peer leaves bytes unread.
    fn is_stalling(&self) -> bool {
        self.stalled_us.load(Ordering::Relaxed) > 0
    }

    /// Whether the peer has left bytes unread for a long time.
    fn is_stalled(&self, now: Instant) -> bool {
        let since = self.stalled_us.load(Ordering::Relaxed);
        let since = (since > 0).then(|| self.opened + Duration::from_micros(since));
        since.is_some_and(|since| now.saturating_duration_since(since) >= SLOW_AFTER)
    }

    fn age_us(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// The number of requests so far, and whether one is running.
    pub(crate) fn activity(&self) -> (usize, bool) {
        (self.started.load(Ordering::Relaxed), self.running.load(Ordering::Relaxed) > 0)
    }

    /// Records that the connection will end with bytes of the peer unread.
    pub(crate) fn leaves_bytes_unread(&self) {
        self.unread.store(true, Ordering::Relaxed);
    }
}

impl InFlight {
    /// Records that the answer is ready and waits for the peer to read it. On HTTP/2 a peer can leave an
    /// answer unread without blocking the socket.
    pub(crate) fn with_answer(mut self) -> Self {
        self.is_answered = true;
        self.activity.answered.fetch_add(1, Ordering::Relaxed);
        self.moves();
        self
    }

    /// Records that a part of the answer was sent.
    pub(crate) fn moves(&self) {
        self.activity.taken_us.store(self.activity.age_us(), Ordering::Relaxed);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Self { activity, is_answered } = self;
        if *is_answered {
            activity.answered.fetch_sub(1, Ordering::Relaxed);
        }
        activity.changed_us.store(activity.age_us(), Ordering::Relaxed);
        activity.running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut bodies = self.activity.bodies();
        if let Some(at) = bodies.iter().position(|began_us| *began_us == self.began_us) {
            bodies.remove(at);
        }
    }
}

/// A socket that keeps reading for a while after its last byte if the peer may still be sending.
#[derive(Debug)]
pub(crate) struct DrainingSocket<T> {
    socket: T,
    activity: Arc<ConnectionActivity>,
    span: Duration,
    bytes_left: usize,
    shut: bool,
    deadline: Deadline,
}

impl<T> DrainingSocket<T> {
    pub(crate) fn new(
        socket: T,
        activity: Arc<ConnectionActivity>,
        span: Duration,
        bytes_max: usize,
    ) -> Self {
        let deadline = Deadline::default();
        Self { socket, activity, span, bytes_left: bytes_max, shut: false, deadline }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for DrainingSocket<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buf)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for DrainingSocket<T> {
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
        if !this.activity.unread.load(Ordering::Relaxed) {
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

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

/// A stream whose peer must finish each HTTP/1 head in time and must read the bytes sent to it.
#[derive(Debug)]
pub(crate) struct WatchedStream<T> {
    stream: T,
    protocol: Protocol,
    activity: Arc<ConnectionActivity>,
    /// Bytes read before the protocol was known.
    first: FirstBytes,
    first_taken: usize,
    framing: FramingWatch,
    frames: FrameWatch,
    /// The value of `activity.started` when the deadline of the head was set.
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

impl<T> WatchedStream<T> {
    /// `head_by` is the time by which the first head must be complete.
    pub(crate) fn new(
        stream: T,
        protocol: Protocol,
        activity: Arc<ConnectionActivity>,
        first: FirstBytes,
        head_by: time::Instant,
        head_span: Duration,
        stall_span: Duration,
    ) -> Self {
        Self {
            stream,
            protocol,
            activity,
            first,
            first_taken: 0,
            framing: FramingWatch::default(),
            frames: FrameWatch::new(Instant::now()),
            head_of: 0,
            head_span,
            head_deadline: Deadline { at: Some(head_by), timer: None },
            stall_span,
            stall_deadline: Deadline::default(),
        }
    }

    /// Checks the bytes that were read, before the parser gets them.
    fn check_read(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.protocol == Protocol::Http2 {
            let is_flooded = self.frames.feed(bytes, Instant::now()).is_err();
            let flooded = || io::Error::other("too many HTTP/2 frames without progress");
            return if is_flooded { Err(flooded()) } else { Ok(()) };
        }
        self.framing.feed(bytes);
        if let Some(nth) = self.framing.ambiguous_from() {
            self.activity.ambiguous_from.store(nth, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Records the bytes that were written.
    fn wrote(&mut self, polled: &Poll<io::Result<usize>>) {
        if self.protocol == Protocol::Http2
            && let Poll::Ready(Ok(bytes)) = polled
        {
            self.frames.sent(*bytes);
        }
    }

    fn begin_head_of(&mut self, started: usize) {
        if self.head_of != started {
            self.head_of = started;
            self.head_deadline.clear();
        }
    }

    /// Checks whether a head is overdue, when there is nothing to read.
    fn wait_for_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.protocol == Protocol::Http2 {
            return Poll::Pending;
        }
        let (started, running) = self.activity.activity();
        self.begin_head_of(started);
        if running || !(self.framing.is_in_head() || self.head_deadline.is_set()) {
            return Poll::Pending;
        }
        ready!(self.head_deadline.poll_within(cx, self.head_span));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the request head is overdue")))
    }

    fn wait_for_peer<R>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<R>> {
        if !self.stall_deadline.is_set() {
            self.activity.stalled_us.store(self.activity.age_us().max(1), Ordering::Relaxed);
        }
        ready!(self.stall_deadline.poll_within(cx, self.stall_span));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the peer did not read the answer in time",
        )))
    }

    fn progress<R>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        match polled {
            Poll::Pending => self.wait_for_peer(cx),
            Poll::Ready(done) => {
                if self.stall_deadline.is_set() {
                    self.stall_deadline.clear();
                    self.activity.stalled_us.store(0, Ordering::Relaxed);
                }
                Poll::Ready(done)
            }
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WatchedStream<T> {
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
            return Poll::Ready(this.check_read(part));
        }
        let before = buf.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Ready(Ok(())) => Poll::Ready(this.check_read(&buf.filled()[before..])),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => this.wait_for_head(cx),
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WatchedStream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(&polled);
        self.progress(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(&polled);
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
        // A head that never became a request: it was refused, and its peer may still be sending.
        let (started, _) = self.activity.activity();
        if self.framing.heads() > started {
            self.activity.leaves_bytes_unread();
        }
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.progress(cx, polled)
    }
}

/// A deadline that is set when waiting begins. Its timer is created once and reused.
#[derive(Debug, Default)]
struct Deadline {
    at: Option<time::Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Deadline {
    fn is_set(&self) -> bool {
        self.at.is_some()
    }

    fn clear(&mut self) {
        self.at = None;
    }

    /// Ready once the deadline has passed. If none is set, it is set to `span` from now.
    fn poll_within(&mut self, cx: &mut Context<'_>, span: Duration) -> Poll<()> {
        let at = *self.at.get_or_insert_with(|| time::Instant::now() + span);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        timer.as_mut().poll(cx)
    }
}
