//! Handshakes: what some senders ask before or between their events, and the answer they require.

use bytes::Bytes;
use http::{HeaderMap, Method};

use crate::arrival::Arrival;
use crate::source::Source;
use crate::verify::Refusal;

/// Which handshake a sender has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Challenge {}

/// An answer that is not about an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The HTTP status.
    pub status: u16,
    /// `content-type` and whatever else the sender insists on.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Bytes,
}

impl Reply {
    /// 200 with nothing in it.
    pub fn empty() -> Self {
        Self { status: 200, headers: Vec::new(), body: Bytes::new() }
    }
}

impl Challenge {
    /// Answers a request that is no POST (GET challenges, OPTIONS of CloudEvents), or `None` where
    /// this sender has nothing of the kind: then it is a plain 405.
    pub fn unsigned(
        self,
        _source: &Source,
        _method: &Method,
        _query: &str,
        _headers: &HeaderMap,
    ) -> Option<Reply> {
        match self {}
    }

    /// Whether this sender has a handshake that is a POST without a signature. Such a request must
    /// not be turned away for its missing header or its content type before [`crate::verify`] sees
    /// it.
    pub fn posts_unsigned(self) -> bool {
        match self {}
    }

    /// Answers a signed POST that is a handshake and no event.
    pub fn signed(self, _source: &Source, _arrival: &Arrival) -> Result<Option<Reply>, Refusal> {
        match self {}
    }
}
