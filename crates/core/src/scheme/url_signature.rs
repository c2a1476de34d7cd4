//! Senders that sign their URL together with the fields of a form: Twilio, and Plivo, whose sorted URL
//! [`super::composed`] hashes.

use std::borrow::Cow;

use aws_lc_rs::{constant_time, digest, hmac};
use http::HeaderMap;
use jiff::Timestamp;

use super::keys::{self, ExpiringKey};
use super::recipe::{Encoding, KeyForm};
use super::{
    Authentic, SchemeError, SchemeVerifier, SignError, Signed, SignedContent, expired,
    first_missing, needed,
};
use crate::arrival::Arrival;
use crate::envelope::form::decode;
use crate::source::SourceSpec;
use crate::verify::Refusal;

/// Name and value, decoded.
type Field = (Vec<u8>, Vec<u8>);

const HEADER: &str = "x-twilio-signature";
const BODY_DIGEST: &str = "bodySHA256=";

/// HMAC-SHA1 over the URL and the form's fields, sorted and without separators. A body that is not a form
/// must be covered by its digest in the URL; otherwise the request is refused.
pub(super) struct TwilioVerifier {
    keys: Vec<ExpiringKey<hmac::Key>>,
}

impl TwilioVerifier {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        let keys = keys::prepare(&spec.secrets, |text| {
            let key = keys::key_bytes(KeyForm::Text, text)?;
            Ok(hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, &key))
        })?;
        Ok(Self { keys })
    }
}

impl SchemeVerifier for TwilioVerifier {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        first_missing(headers, std::iter::once(HEADER))
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let header = needed(arrival, HEADER)?;
        let mut signature = [0; 32];
        let length = keys::decode(Encoding::Base64, header.as_bytes(), &mut signature)
            .ok_or_else(|| Refusal::Signature(format!("no well-formed signature in {HEADER}")))?;
        let fields = covered_fields(arrival)?;
        let mut tried = 0;
        for (secret, key) in keys::active(&self.keys, now) {
            tried += 1;
            for url in spellings(&arrival.url) {
                let tag = tag(key, &url, &fields);
                if constant_time::verify_slices_are_equal(tag.as_ref(), &signature[..length])
                    .is_ok()
                {
                    check_field_boundaries(arrival, &TWILIO)?;
                    return Ok(Authentic { signed_at: None, secret });
                }
            }
        }
        match tried {
            0 => Err(expired()),
            _ => Err(Refusal::Signature(
                "the signature was not made with the secret of this source, or public_url differs"
                    .into(),
            )),
        }
    }

    fn sign(&self, request: &Arrival, _id: &str, now: Timestamp) -> Result<Signed, SignError> {
        let (_, key) = keys::active(&self.keys, now)
            .next()
            .ok_or_else(|| SignError("every secret of this source has expired".into()))?;
        let mut draft = request.clone();
        let mut signed = Signed::default();
        let is_json = matches!(draft.body.first(), Some(b'{' | b'['));
        if is_json && body_digest(&draft).is_none() {
            let separator = if draft.url.contains('?') { '&' } else { '?' };
            let digest = hex::encode(digest::digest(&digest::SHA256, &draft.body));
            draft.url = format!("{}{separator}bodySHA256={digest}", draft.url);
            signed.url = Some(draft.url.clone());
        }
        let fields = covered_fields(&draft).map_err(|refusal| SignError(refusal.to_string()))?;
        let tag = tag(key, &draft.url, &fields);
        signed.headers.push((HEADER.to_owned(), keys::encode(Encoding::Base64, tag.as_ref())));
        Ok(signed)
    }

    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        let url = without_port(&arrival.url);
        let fields = covered_fields(arrival)?;
        let pieces = fields.iter().flat_map(|(name, value)| [&name[..], &value[..]]);
        Ok(SignedContent::whole(std::iter::once(url.as_bytes()).chain(pieces)))
    }
}

fn tag(key: &hmac::Key, url: &str, fields: &[Field]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    context.update(url.as_bytes());
    for (name, value) in fields {
        context.update(name);
        context.update(value);
    }
    context.sign()
}

/// The form's fields as they are signed: sorted, each pair once. The list is empty if the URL contains the
/// body's digest.
fn covered_fields(arrival: &Arrival) -> Result<Vec<Field>, Refusal> {
    if let Some(named) = body_digest(arrival) {
        if !matches!(arrival.body.trim_ascii_start().first(), Some(b'{' | b'[')) {
            return Err(Refusal::Signature(
                "the URL contains a digest of the body, and the body is not JSON".into(),
            ));
        }
        let mut expected = [0; 32];
        let length = keys::decode(Encoding::Hex, &named, &mut expected).unwrap_or_default();
        let actual = digest::digest(&digest::SHA256, &arrival.body);
        return match constant_time::verify_slices_are_equal(actual.as_ref(), &expected[..length]) {
            Ok(()) => Ok(Vec::new()),
            Err(_) => {
                Err(Refusal::Signature("the body does not match its digest in the URL".into()))
            }
        };
    }
    let mut fields = form_fields(arrival)?;
    fields.sort();
    fields.dedup();
    Ok(fields)
}

/// The digest in the URL. The digest must be the last parameter, where the sender puts it. The form's
/// fields follow the URL in the signed content, so a value of a field could otherwise pass as a parameter.
fn body_digest(arrival: &Arrival) -> Option<Vec<u8>> {
    let digest = arrival.query().rsplit('&').next()?.strip_prefix(BODY_DIGEST)?;
    let is_whole = digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_whole.then(|| digest.as_bytes().to_vec())
}

/// The URL as it is, and with its port removed or added: senders and proxies differ on that.
fn spellings(url: &str) -> impl Iterator<Item = String> {
    let other = || {
        let Parts { scheme, authority, port_at, path } = Parts::of(url)?;
        Some(match (port_at, scheme) {
            (Some(at), _) => format!("{scheme}://{}{path}", &authority[..at]),
            (None, "https") => format!("{scheme}://{authority}:443{path}"),
            (None, _) => format!("{scheme}://{authority}:80{path}"),
        })
    };
    std::iter::once(url.to_owned()).chain(other())
}

/// The spelling without a port. A signature is valid for both spellings, and both must have one guard.
fn without_port(url: &str) -> Cow<'_, str> {
    match Parts::of(url) {
        Some(Parts { scheme, authority, port_at: Some(at), path }) => {
            Cow::Owned(format!("{scheme}://{}{path}", &authority[..at]))
        }
        Some(_) | None => Cow::Borrowed(url),
    }
}

/// A URL, split around its port.
struct Parts<'a> {
    scheme: &'a str,
    authority: &'a str,
    /// The offset of the colon before the port in the authority.
    port_at: Option<usize>,
    path: &'a str,
}

impl<'a> Parts<'a> {
    fn of(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let host_at = authority.rfind('@').map_or(0, |at| at + 1);
        let port_at = authority[host_at..].rfind(':').map(|at| host_at + at);
        let port_at = port_at.filter(|at| !authority[*at..].contains(']'));
        Some(Self { scheme, authority, port_at, path })
    }
}

/// Names of fields by which a shifted boundary is recognised. Both senders sign names and values without
/// a separator, so bytes can move from a value into the next name under the same signature.
pub(super) struct KnownFields {
    /// If the signed text contains the names of these fields, the request must have at least one of them.
    ids: &'static [&'static str],
    /// Fields that are present if the signed text contains their names outside of free text.
    others: &'static [&'static str],
    /// Fields whose names contain a name of `ids` or `others` and do not end in it.
    longer: &'static [&'static str],
    /// The fields with free text.
    words: &'static [&'static str],
    /// The fields with a document, which may contain the name of any field.
    documents: &'static [&'static str],
}

pub(super) const TWILIO: KnownFields = KnownFields {
    ids: &["CallSid", "MessageSid", "SmsSid", "FaxSid", "RecordingSid", "EventSid", "TaskSid"],
    others: &["AccountSid", "ApiVersion", "CallStatus", "MessageStatus", "SmsStatus"],
    longer: &["CallSidEndingConference"],
    words: &["Body", "SpeechResult", "UnstableSpeechResult", "TranscriptionText", "ProfileName"],
    documents: &["AddOns", "Payload"],
};

pub(super) const PLIVO: KnownFields = KnownFields {
    ids: &["CallUUID", "MessageUUID", "RequestUUID", "ConferenceUUID"],
    others: &["CallStatus", "ParentMessageUUID"],
    longer: &[],
    words: &["Text", "Speech", "UnstableSpeech", "Transcription"],
    documents: &[],
};

/// Refuses a request in which bytes have moved over a field boundary, so that a field is missing. The signed
/// text then contains the name of the field, and no field or parameter has this name.
pub(super) fn check_field_boundaries(
    arrival: &Arrival,
    marks: &KnownFields,
) -> Result<(), Refusal> {
    // A body that is signed by its digest has no form fields; the URL may carry them instead.
    let mut fields = match body_digest(arrival) {
        Some(_) => Vec::new(),
        None => form_fields(arrival)?,
    };
    fields.sort();
    let query: Vec<Field> = form(arrival.query().as_bytes()).collect();
    let is = |known: &[&str], name: &[u8]| known.iter().any(|known| known.as_bytes() == name);
    // The signed text without the parts that may contain the mark legitimately: other fields whose names
    // end in it, documents and, unless `with_words`, free text. Each is replaced by a newline, so that no
    // mark is found across it.
    let holds = |mark: &[u8], with_words: bool| {
        let mut text = arrival.url.as_bytes().to_vec();
        for (name, value) in &fields {
            let is_word_of = |name: &[u8]| {
                let before = name.strip_suffix(mark).and_then(<[u8]>::last);
                before.is_some_and(u8::is_ascii_lowercase)
            };
            let is_other = is_word_of(name) || is(marks.longer, name) && contains(name, mark);
            let is_left_out = is(marks.documents, name) || (!with_words && is(marks.words, name));
            text.extend_from_slice(if is_other { b"\n" } else { name });
            text.extend_from_slice(if is_left_out { b"\n" } else { value });
        }
        contains(&text, mark)
    };
    let named = |mark: &[u8]| fields.iter().chain(&query).any(|(name, _)| name == mark);
    let has_id = marks.ids.iter().any(|mark| named(mark.as_bytes()));
    let lost = |mark: &&&str| {
        let is_id = marks.ids.contains(mark);
        !named(mark.as_bytes()) && holds(mark.as_bytes(), is_id && !has_id)
    };
    match marks.ids.iter().chain(marks.others).find(lost) {
        Some(mark) => Err(Refusal::Malformed(format!(
            "the signed text contains the field {mark}, but the form has no such field: the field \
             boundaries were changed"
        ))),
        None => Ok(()),
    }
}

fn contains(text: &[u8], mark: &[u8]) -> bool {
    text.windows(mark.len()).any(|window| window == mark)
}

/// Plivo's content: the URL with its query sorted, then the sorted fields of the form.
pub(super) fn sorted(arrival: &Arrival) -> Result<Vec<u8>, Refusal> {
    let url = arrival.url.split(['?', '#']).next().unwrap_or_default();
    let mut query: Vec<_> = form(arrival.query().as_bytes()).collect();
    let mut fields = form_fields(arrival)?;
    query.sort();
    fields.sort();
    let mut content = url.as_bytes().to_vec();
    if !query.is_empty() || !fields.is_empty() {
        content.push(b'?');
    }
    for (place, (name, value)) in query.iter().enumerate() {
        if place > 0 {
            content.push(b'&');
        }
        content.extend_from_slice(name);
        content.push(b'=');
        content.extend_from_slice(value);
    }
    if !query.is_empty() && !fields.is_empty() {
        content.push(b'.');
    }
    for (name, value) in &fields {
        content.extend_from_slice(name);
        content.extend_from_slice(value);
    }
    Ok(content)
}

/// The fields of a form body. The signature covers no other kind of body.
fn form_fields(arrival: &Arrival) -> Result<Vec<Field>, Refusal> {
    const FORM: &str = "application/x-www-form-urlencoded";
    let is_form = match arrival.header_text("content-type") {
        Some(given) => {
            let given = given.split(';').next().unwrap_or_default().trim();
            given.eq_ignore_ascii_case(FORM)
        }
        None => true,
    };
    if !is_form && !arrival.body.is_empty() {
        return Err(Refusal::Signature(
            "the body is not a form, so the signature does not cover it".into(),
        ));
    }
    Ok(form(&arrival.body).collect())
}

/// Decodes urlencoded pairs, byte for byte.
fn form(text: &[u8]) -> impl Iterator<Item = Field> {
    text.split(|byte| *byte == b'&').filter(|pair| !pair.is_empty()).map(|pair| {
        let at = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
        let value = pair.get(at + 1..).unwrap_or_default();
        (decode(&pair[..at]).into_owned(), decode(value).into_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_tried_with_and_without_its_port() {
        fn check(url: &str, other: &str) {
            assert_eq!(spellings(url).collect::<Vec<_>>(), [url, other]);
        }
        check("https://a.test/x?y", "https://a.test:443/x?y");
        check("http://a.test", "http://a.test:80");
        check("https://a.test:443/x", "https://a.test/x");
        check("https://a.test:8443?x=a:b", "https://a.test?x=a:b");
        check("https://u:p@a.test/x", "https://u:p@a.test:443/x");
        check("https://[::1]/x", "https://[::1]:443/x");
        check("https://[::1]:8443/x", "https://[::1]/x");
    }

    #[test]
    fn form_fields_are_decoded_as_browsers_encode_them() {
        let fields: Vec<_> = form(b"a=1+2&&b=%2B%zz%4&c&=d").collect();
        let text: Vec<_> = fields
            .iter()
            .map(|(name, value)| (String::from_utf8_lossy(name), String::from_utf8_lossy(value)))
            .collect();
        assert_eq!(
            text.iter().map(|(name, value)| (&**name, &**value)).collect::<Vec<_>>(),
            [("a", "1 2"), ("b", "+%zz%4"), ("c", ""), ("", "d")]
        );
    }
}
