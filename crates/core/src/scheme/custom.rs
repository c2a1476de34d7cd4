//! `[sources.NAME.scheme]`: a custom scheme, compiled like those of the presets.

use super::composed::ComposedVerifier;
use super::coverage::Coverage;
use super::recipe::{
    Carrier, ComposedSignature, Encoding, KeyForm, SignatureAlgorithm, Time, TimeAt, TimeForm,
};
use super::{CustomScheme, SchemeError};
use crate::envelope::IdSpec;
use crate::source::SourceSpec;

pub(super) fn compile(
    custom: &CustomScheme,
    spec: &SourceSpec,
) -> Result<(ComposedVerifier, Coverage, KeyForm), SchemeError> {
    let algorithm = match custom.algorithm.as_deref().unwrap_or("hmac-sha256") {
        "hmac-sha256" => SignatureAlgorithm::HmacSha256,
        "hmac-sha1" => SignatureAlgorithm::HmacSha1,
        "hmac-sha512" => SignatureAlgorithm::HmacSha512,
        other => {
            return Err(unknown("algorithm", other, "hmac-sha256, hmac-sha1 or hmac-sha512"));
        }
    };
    let encoding = match custom.encoding.as_deref().unwrap_or("hex") {
        "hex" => Encoding::Hex,
        "base64" => Encoding::Base64,
        other => return Err(unknown("encoding", other, "hex or base64")),
    };
    let key = match custom.secret_encoding.as_deref().unwrap_or("utf8") {
        "utf8" => KeyForm::Text,
        "base64" => KeyForm::Base64,
        "hex" => KeyForm::Hex,
        other => return Err(unknown("secret_encoding", other, "utf8, base64 or hex")),
    };
    let name = custom.header.as_deref().unwrap_or_default();
    let name = header_name(name).ok_or_else(|| {
        wrong(
            "the scheme needs header",
            "header = \"x-signature\" names the header with the signature",
        )
    })?;
    let content = with_id(custom.content.as_deref().unwrap_or("{body}"), spec)?;
    if !content.contains("{body}") {
        return Err(wrong(
            "content does not sign the body, so an attacker could change it",
            "add {body} to content",
        ));
    }
    if content.contains("{sorted_url}") {
        return Err(wrong("content has an unknown placeholder {sorted_url}", "use {url}"));
    }
    if content.contains("{url}") && !spec.url_known {
        return Err(wrong(
            "content signs the URL, and public_url is not set",
            "set public_url at the top of the config to the address that the sender posts to",
        ));
    }
    let timestamp = custom.timestamp.as_deref();
    let time_header = timestamp.and_then(|at| at.strip_prefix("header:")).and_then(header_name);
    let at = match (timestamp, content.contains("{timestamp}")) {
        (None, false) => None,
        (None, true) => {
            return Err(wrong(
                "content has {timestamp}, and timestamp is not set",
                "timestamp = \"header:x-timestamp\" names its header",
            ));
        }
        (Some(at), true) => match &time_header {
            Some(name) => Some(TimeAt::Header(name)),
            None => {
                return Err(wrong(
                    &format!("{{timestamp}} cannot be read from \"{at}\" before the check"),
                    "timestamp = \"header:x-timestamp\" names its header",
                ));
            }
        },
        (Some(at), false) if at.starts_with('/') => Some(TimeAt::Body(at)),
        (Some(_), false) => {
            return Err(wrong(
                "content does not sign the timestamp, so an attacker could change it",
                "add {timestamp} to content, or remove timestamp",
            ));
        }
    };
    let composed = ComposedSignature {
        algorithm,
        key,
        carrier: Carrier::Header {
            name: &name,
            prefix: custom.prefix.as_deref().unwrap_or_default(),
            encoding,
        },
        content: &content,
        time: at.map(|at| Time { at, form: TimeForm::Any }),
        fixed: &[],
    };
    let coverage = Coverage::of_composed(&composed).with_loose_cuts(&content);
    Ok((ComposedVerifier::compile(&composed, spec)?, coverage, key))
}

/// `{id}` is the header that `event_id` names.
fn with_id(content: &str, spec: &SourceSpec) -> Result<String, SchemeError> {
    if !content.contains("{id}") {
        return Ok(content.to_owned());
    }
    let header = match &spec.envelope.event_id {
        Some(IdSpec::Selector(selector)) => selector.strip_prefix("header:"),
        Some(IdSpec::Hash { .. }) | None => None,
    };
    match header {
        Some(name) => Ok(content.replace("{id}", &format!("{{header:{name}}}"))),
        None => Err(wrong(
            "content has {id}, and event_id does not name a header",
            "set event_id = \"header:x-id\"; an id inside the body is signed with the body",
        )),
    }
}

fn header_name(name: &str) -> Option<String> {
    http::HeaderName::from_bytes(name.as_bytes()).ok().map(|name| name.as_str().to_owned())
}

fn unknown(key: &str, value: &str, known: &str) -> SchemeError {
    SchemeError::new("scheme", format!("unknown {key} \"{value}\""), format!("{key} is {known}"))
}

fn wrong(problem: &str, hint: &str) -> SchemeError {
    SchemeError::new("scheme", problem, hint)
}
