//! Converts a response into a stored answer and back: which headers are stored, and how much of the body.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use hapax_core::hop_headers::{ConnectionHeaders, is_hop_by_hop};
use hapax_core::ledger::StoredAnswer;
use hapax_core::limits::{ANSWER_BODY_BYTES_MAX, ANSWER_HEADER_BYTES_MAX};
use http::header::{CONTENT_LENGTH, SET_COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

use crate::{Body, BoxError};

/// Marks an answer that belongs to the first request with the key.
pub(crate) const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// The part of a complete response that is stored. `None` if that part is too large.
///
/// Hop-by-hop headers, cookies (which belong to the first client only) and values that are not text are
/// left out.
pub(crate) fn kept(response: &Response<Body>, body: Bytes) -> Option<StoredAnswer> {
    let of_connection = ConnectionHeaders::named_in(response.headers());
    let headers: Vec<_> = response
        .headers()
        .iter()
        .filter(|(name, _)| is_kept(name) && !of_connection.contains(name))
        .filter_map(|(name, value)| {
            let value = std::str::from_utf8(value.as_bytes()).ok()?;
            Some((name.as_str().to_owned(), value.to_owned()))
        })
        .collect();
    let header_bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    let fits = header_bytes <= ANSWER_HEADER_BYTES_MAX && body.len() <= ANSWER_BODY_BYTES_MAX;
    fits.then_some(StoredAnswer { status: response.status(), headers, body })
}

/// A stored answer as a response, for a handler that commits its answer itself and then returns it.
///
/// The answer may have been written by hand, so invalid and hop-by-hop headers are left out.
pub fn answered(answer: StoredAnswer) -> Response<Body> {
    let mut response = Response::new(Body::from(answer.body));
    *response.status_mut() = answer.status;
    for (name, value) in answer.headers {
        let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value.as_bytes()))
        else {
            continue;
        };
        if is_kept(&name) {
            response.headers_mut().append(name, value);
        }
    }
    response
}

/// A stored answer for a request that did not run.
pub(crate) fn replayed(answer: StoredAnswer) -> Response<Body> {
    let mut response = answered(answer);
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    response
}

fn is_kept(name: &HeaderName) -> bool {
    !is_hop_by_hop(name.as_str()) && ![CONTENT_LENGTH, SET_COOKIE, REPLAYED].contains(name)
}

/// The body of an answer, as far as it can be stored.
pub(crate) enum CollectedBody<B> {
    /// The whole body, and its trailers, which only the first caller gets.
    Whole { body: Bytes, trailers: Option<HeaderMap> },
    /// The body is too large, or not complete in time. Its start was read already.
    Unbounded(ResumedBody<B>),
    /// The body was interrupted.
    Broken(BoxError),
}

/// Reads an answer up to the size limit, and until `deadline` at most, because a stream of events
/// never ends.
pub(crate) async fn collect<B>(body: B, deadline: Instant) -> CollectedBody<B>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let mut body = Box::pin(body);
    let mut gathered = BytesMut::new();
    let mut trailers = None;
    if body.size_hint().lower() > ANSWER_BODY_BYTES_MAX as u64 {
        return CollectedBody::Unbounded(ResumedBody { first: VecDeque::new(), rest: body });
    }
    loop {
        let frame = match timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(error))) => return CollectedBody::Broken(error.into()),
            Ok(None) => return CollectedBody::Whole { body: gathered.freeze(), trailers },
            Err(_) => {
                let first = VecDeque::from([Frame::data(gathered.freeze())]);
                return CollectedBody::Unbounded(ResumedBody { first, rest: body });
            }
        };
        match frame.into_data().map_err(Frame::into_trailers) {
            Ok(data) if gathered.len() + data.len() > ANSWER_BODY_BYTES_MAX => {
                let first = VecDeque::from([Frame::data(gathered.freeze()), Frame::data(data)]);
                return CollectedBody::Unbounded(ResumedBody { first, rest: body });
            }
            Ok(data) => gathered.extend_from_slice(&data),
            Err(Ok(found)) => trailers = Some(found),
            // A kind of frame that HTTP does not define yet.
            Err(Err(_)) => {}
        }
    }
}

/// A body whose start was read already.
pub(crate) struct ResumedBody<B> {
    first: VecDeque<Frame<Bytes>>,
    rest: Pin<Box<B>>,
}

impl<B> http_body::Body for ResumedBody<B>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.first.pop_front() {
            Some(frame) => Poll::Ready(Some(Ok(frame))),
            None => self
                .rest
                .as_mut()
                .poll_frame(context)
                .map(|frame| frame.map(|read| read.map_err(Into::into))),
        }
    }
}
