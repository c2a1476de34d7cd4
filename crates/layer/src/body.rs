//! The body type of requests and answers in the layer: any body, boxed.
//!
//! The body is a type and not an alias: with the bare box, the compiler cannot prove that the
//! layer's futures are `Send`, and the callers' code would not compile.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Full};

use crate::BoxError;

/// The body of the request that the inner service gets, and of every answer.
pub struct Body(UnsyncBoxBody<Bytes, BoxError>);

impl Body {
    /// Any body, streamed as it comes.
    pub fn new<B>(body: B) -> Self
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self(body.map_err(Into::into).boxed_unsync())
    }

    /// An empty body.
    pub fn empty() -> Self {
        Self::new(Empty::new())
    }

    /// A complete body with its trailers.
    pub(crate) fn whole(body: Bytes, trailers: Option<HeaderMap>) -> Self {
        match trailers {
            None => Self::new(Full::new(body)),
            Some(trailers) => {
                Self::new(Full::new(body).with_trailers(async move { Some(Ok(trailers)) }))
            }
        }
    }
}

impl<T: Into<Bytes>> From<T> for Body {
    fn from(body: T) -> Self {
        Self::whole(body.into(), None)
    }
}

impl Default for Body {
    fn default() -> Self {
        Self::empty()
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body").finish_non_exhaustive()
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}
