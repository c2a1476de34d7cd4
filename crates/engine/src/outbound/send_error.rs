//! Why an endpoint gave no answer, in classes that programs match and words that people read.
//!
//! The text never contains an address that a name resolved to: the text is shown to the party that
//! chose the name, and would otherwise reveal our internal network.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

use tokio_rustls::rustls::{self, CertificateError};

use super::guard_rules::Blocked;
use super::resolver::LookupError;
use crate::limits::{ENDPOINT_ANSWER_HEAD_BYTES_MAX, SEND_ERROR_CHARS_MAX};

/// Why an endpoint gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct SendError {
    /// The kind of the failure.
    pub class: SendErrorClass,
    /// The failure in words.
    pub text: String,
    /// Whether the endpoint can have seen the request. False only if no byte of it was written.
    pub may_have_arrived: bool,
}

/// Kinds of failures without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SendErrorClass {
    /// The name does not exist, has no address, or could not be looked up.
    Dns,
    /// The rules for endpoints block the address or the port. Nothing was connected to.
    Blocked,
    /// The connection was refused.
    Refused,
    /// No connection for another reason.
    Connect,
    /// The server's certificate was not accepted, or its TLS is broken.
    Tls,
    /// The deadline passed, at any stage.
    Timeout,
    /// The connection broke, or the answer is not HTTP.
    Broken,
    /// A connection that was kept open closed before the request was written. This says nothing about the
    /// endpoint.
    Unsent,
}

/// The stage that a request has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Lookup,
    Connect,
    Handshake,
    Answer,
    Body,
}

impl SendErrorClass {
    /// The word that is stored, logged and counted.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Blocked => "blocked",
            Self::Refused => "refused",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::Broken => "broken",
            Self::Unsent => "unsent",
        }
    }
}

impl fmt::Display for SendErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl SendError {
    pub(super) fn blocked(host: &str, why: Blocked) -> Self {
        Self::unsent(SendErrorClass::Blocked, format!("{host} may not be an endpoint: {why}"))
    }

    /// A public address of the machine that Hapax runs on.
    pub(super) fn this_machine(host: &str) -> Self {
        let text = format!("{host} may not be an endpoint: it is the machine that Hapax runs on");
        Self::unsent(SendErrorClass::Blocked, text)
    }

    pub(super) fn dns(host: &str, why: &LookupError) -> Self {
        Self::unsent(SendErrorClass::Dns, format!("looking up {host}: {why}"))
    }

    pub(super) fn connect(host: &str, port: u16, error: &io::Error) -> Self {
        let class = match error.kind() {
            io::ErrorKind::ConnectionRefused => SendErrorClass::Refused,
            _ => SendErrorClass::Connect,
        };
        Self::unsent(class, format!("connecting to {host}:{port}: {}", plain(error)))
    }

    pub(super) fn proxy(error: &(dyn Error + 'static)) -> Self {
        let text = format!("connecting through the egress proxy: {}", deepest(error));
        Self::unsent(SendErrorClass::Connect, text)
    }

    pub(super) fn tls(host: &str, error: &io::Error) -> Self {
        let why = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        let why = why.map_or_else(|| plain(error), |error| certificate(host, error));
        Self::unsent(SendErrorClass::Tls, format!("TLS with {host}: {why}"))
    }

    /// The deadline passed at this stage.
    pub(super) fn timeout(stage: Stage, deadline: Duration) -> Self {
        let doing = match stage {
            Stage::Lookup => "the name was not resolved",
            Stage::Connect => "no connection was made",
            Stage::Handshake => "the TLS handshake did not end",
            Stage::Answer => "no answer came",
            Stage::Body => "the answer did not end",
        };
        Self {
            class: SendErrorClass::Timeout,
            text: format!("{doing} within {deadline:?}"),
            may_have_arrived: stage >= Stage::Answer,
        }
    }

    /// A connection from the pool was closed before the request was written.
    pub(super) fn never_sent() -> Self {
        let text = "the connection was closed before the request was sent".to_owned();
        Self::unsent(SendErrorClass::Unsent, text)
    }

    /// The request was at least in part written, and then the connection failed.
    pub(super) fn broken(error: &(dyn Error + 'static)) -> Self {
        let http = chain(error).find_map(|error| error.downcast_ref::<hyper::Error>());
        let text = match http {
            Some(http) if http.is_parse_too_large() => format!(
                "the head of the answer is larger than {ENDPOINT_ANSWER_HEAD_BYTES_MAX} bytes"
            ),
            Some(http) if http.is_parse() => "the answer is not HTTP/1.1".to_owned(),
            Some(http) if http.is_incomplete_message() || ends_early(error) => {
                "the connection was closed before the answer ended".to_owned()
            }
            Some(_) | None => format!("the connection broke: {}", deepest(error)),
        };
        Self { class: SendErrorClass::Broken, text: shortened(text), may_have_arrived: true }
    }

    fn unsent(class: SendErrorClass, text: String) -> Self {
        Self { class, text: shortened(text), may_have_arrived: false }
    }
}

/// The text for a certificate error, or for an error of TLS as a whole.
fn certificate(host: &str, error: &rustls::Error) -> String {
    use CertificateError as Certificate;
    match error {
        rustls::Error::InvalidCertificate(problem) => match problem {
            Certificate::Expired | Certificate::ExpiredContext { .. } => {
                "the certificate has expired".to_owned()
            }
            Certificate::NotValidYet | Certificate::NotValidYetContext { .. } => {
                "the certificate is not valid yet".to_owned()
            }
            Certificate::UnknownIssuer => {
                "the certificate comes from no public certificate authority".to_owned()
            }
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. } => {
                format!("the certificate is not valid for {host}")
            }
            Certificate::Revoked => "the certificate was revoked".to_owned(),
            other => format!("the certificate was not accepted: {other}"),
        },
        rustls::Error::InvalidMessage(_) => "the server does not speak TLS here".to_owned(),
        other => other.to_string(),
    }
}

/// An error and its causes, outermost first.
pub(super) fn chain<'a>(
    error: &'a (dyn Error + 'static),
) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// The first cause: the errors around it repeat only that a request failed.
pub(super) fn deepest(error: &(dyn Error + 'static)) -> String {
    let cause = chain(error).last().unwrap_or(error);
    match cause.downcast_ref::<io::Error>() {
        Some(error) => plain(error),
        None => cause.to_string(),
    }
}

/// Whether a body ended before its announced length.
fn ends_early(error: &(dyn Error + 'static)) -> bool {
    let early = |error: &io::Error| error.kind() == io::ErrorKind::UnexpectedEof;
    chain(error).filter_map(|error| error.downcast_ref::<io::Error>()).any(early)
}

/// An I/O error without the number of the operating system.
fn plain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(_) => error.kind().to_string(),
        None => error.to_string(),
    }
}

/// A certificate can contain any number of names, and an error lists them.
fn shortened(text: String) -> String {
    match text.char_indices().nth(SEND_ERROR_CHARS_MAX) {
        Some((end, _)) => text[..end].to_owned(),
        None => text,
    }
}
