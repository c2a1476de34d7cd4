//! Signatures over composed content, carried in headers, as with most senders. The content is
//! hashed piece by piece, so that the body is not copied.

use std::borrow::Cow;

use aws_lc_rs::signature::{self, ParsedPublicKey};
use aws_lc_rs::{constant_time, digest, hmac};
use bytes::Bytes;
use http::HeaderMap;
use jiff::Timestamp;
use serde_json::Value;
use zeroize::Zeroizing;

use super::keys::{self, ExpiringKey};
use super::recipe::{
    Carrier, ComposedSignature, Encoding, Fixed, KeyForm, SignatureAlgorithm, TimeAt, TimeForm,
};
use super::{
    Authentic, SchemeError, SchemeVerifier, SignError, Signed, SignedContent, expired, finished,
    first_missing, needed, only_the_sender, param, time, url_signature,
};
use crate::arrival::Arrival;
use crate::ed25519;
use crate::limits::SIGNATURES_MAX;
use crate::source::SourceSpec;
use crate::verify::Refusal;

/// A compiled [`ComposedSignature`].
pub(super) struct ComposedVerifier {
    keys: Keys,
    /// The headers with signatures: a single header, one for each secret, or a name to which numbers are
    /// appended.
    names: Vec<Box<str>>,
    prefix: Box<str>,
    layout: Layout,
    encoding: Encoding,
    parts: Vec<ContentPart>,
    time: Option<(TimeLocation, TimeForm)>,
    fixed: Vec<(Box<str>, Box<str>)>,
}

enum Keys {
    Hmac(Vec<ExpiringKey<hmac::Key>>),
    Suffix(&'static digest::Algorithm, Vec<ExpiringKey<Zeroizing<Vec<u8>>>>),
    Public(SignatureAlgorithm, Vec<ExpiringKey<ParsedPublicKey>>),
}

enum Layout {
    Whole,
    Pairs {
        separator: char,
        blank_after: bool,
        after_others: bool,
        time: Box<str>,
        label: Box<str>,
    },
    Versions {
        label: Box<str>,
    },
    List,
    Numbered,
    Slots,
}

enum ContentPart {
    Text(Box<str>),
    Body,
    Time,
    Url,
    SortedUrl,
    Method,
    Header(Box<str>),
}

enum TimeLocation {
    Header(Box<str>),
    Pair,
    Body(Box<str>),
}

impl ComposedVerifier {
    pub(super) fn compile(
        composed: &ComposedSignature<'_>,
        spec: &SourceSpec,
    ) -> Result<Self, SchemeError> {
        let owned = |names: &[&str]| names.iter().map(|name| Box::from(*name)).collect::<Vec<_>>();
        let (names, prefix, layout, encoding) = match composed.carrier {
            Carrier::Header { name, prefix, encoding } => {
                (owned(&[name]), prefix, Layout::Whole, encoding)
            }
            Carrier::Pairs {
                name,
                separator,
                blank_after,
                after_others,
                time,
                label,
                encoding,
            } => {
                let (time, label) = (time.into(), label.into());
                let layout = Layout::Pairs { separator, blank_after, after_others, time, label };
                (owned(&[name]), "", layout, encoding)
            }
            Carrier::Versions { name, label, encoding } => {
                (owned(&[name]), "", Layout::Versions { label: label.into() }, encoding)
            }
            Carrier::List { name, encoding } => (owned(&[name]), "", Layout::List, encoding),
            Carrier::Numbered { stem, encoding } => {
                (owned(&[stem]), "", Layout::Numbered, encoding)
            }
            Carrier::Slots { names, encoding } => {
                if spec.secrets.len() > names.len() {
                    return Err(SchemeError::new(
                        "secrets",
                        format!("{} has {} keys at most", spec.provider, names.len()),
                        "list them in the sender's order: the first signs only the first header",
                    ));
                }
                (owned(names), "", Layout::Slots, encoding)
            }
        };
        let fixed = composed.fixed.iter().map(|(name, fixed)| {
            let value = match fixed {
                Fixed::Text(text) => *text,
                Fixed::Param(name) => param(spec, name, "the key that goes with the secret")?,
            };
            Ok((Box::from(*name), Box::from(value)))
        });
        Ok(Self {
            keys: Keys::prepare(composed.algorithm, composed.key, spec)?,
            names,
            prefix: prefix.into(),
            layout,
            encoding,
            parts: parts(composed.content)?,
            time: composed.time.map(|time| (TimeLocation::from(time.at), time.form)),
            fixed: fixed.collect::<Result<_, _>>()?,
        })
    }

    /// Every required header, signatures first.
    fn headers(&self) -> impl Iterator<Item = &str> {
        let signatures = match self.layout {
            Layout::Whole | Layout::Pairs { .. } | Layout::Versions { .. } | Layout::List => 1,
            // The sender's keys decide which of these headers are present.
            Layout::Numbered | Layout::Slots => 0,
        };
        let time = match &self.time {
            Some((TimeLocation::Header(name), _)) => Some(&**name),
            Some((TimeLocation::Pair | TimeLocation::Body(_), _)) | None => None,
        };
        let parts = self.parts.iter().filter_map(|part| match part {
            ContentPart::Header(name) => Some(&**name),
            ContentPart::Text(_)
            | ContentPart::Body
            | ContentPart::Time
            | ContentPart::Url
            | ContentPart::SortedUrl
            | ContentPart::Method => None,
        });
        let names = self.names.iter().take(signatures).map(|name| &**name);
        names.chain(time).chain(parts).chain(self.fixed.iter().map(|(name, _)| &**name))
    }

    fn check_fixed(&self, arrival: &Arrival) -> Result<(), Refusal> {
        for (name, value) in &self.fixed {
            if *needed(arrival, name)? != **value {
                return Err(Refusal::Signature(format!("the {name} header is not {value}")));
            }
        }
        Ok(())
    }

    /// Collects the signatures of one header, and returns the timestamp beside them.
    fn collect<'h>(
        &self,
        header: &'h str,
        found: &mut FoundSignatures,
    ) -> Result<Option<&'h str>, Refusal> {
        match &self.layout {
            Layout::Whole | Layout::Numbered | Layout::Slots => {
                let signature = header.strip_prefix(&*self.prefix).ok_or_else(|| {
                    Refusal::Signature(format!("the signature does not begin with {}", self.prefix))
                })?;
                found.push(self.encoding, signature, None)?;
                Ok(None)
            }
            Layout::Versions { label } => {
                for signature in header.split(' ').filter_map(|entry| entry.split_once(',')) {
                    if signature.0 == &**label {
                        found.push(self.encoding, signature.1, None)?;
                    }
                }
                Ok(None)
            }
            Layout::List => {
                for signature in header.split(',') {
                    found.push(self.encoding, signature, None)?;
                }
                Ok(None)
            }
            Layout::Pairs { separator, blank_after, after_others, time, label } => {
                let mut at = None;
                let pairs = match after_others {
                    true => header.rsplit(' ').next().unwrap_or(header),
                    false => header,
                };
                for (label_here, value) in
                    pairs.split(*separator).filter_map(|pair| pair.split_once('='))
                {
                    let bare = label_here.trim_matches([' ', '\t']);
                    let ours = bare == &**time || bare == &**label;
                    let blanks = label_here.len() - bare.len();
                    if ours && blanks > usize::from(*blank_after) {
                        return Err(Refusal::Signature(format!("blanks before {bare}=")));
                    }
                    if bare == &**label {
                        found.push(self.encoding, value, None)?;
                    } else if bare == &**time && at.replace(value).is_some() {
                        return Err(Refusal::Signature(format!("{time}= occurs twice")));
                    }
                }
                Ok(at)
            }
        }
    }

    /// Collects signatures that have a header each.
    fn collect_several(
        &self,
        arrival: &Arrival,
        found: &mut FoundSignatures,
    ) -> Result<(), Refusal> {
        match &self.layout {
            Layout::Numbered => {
                for number in 1..=SIGNATURES_MAX {
                    match arrival.header_text(&format!("{}{number}", self.names[0])) {
                        Some(header) => found.push(self.encoding, &header, None)?,
                        None => break,
                    }
                }
            }
            Layout::Slots => {
                for (slot, name) in self.names.iter().enumerate() {
                    if let Some(header) = arrival.header_text(name) {
                        found.push(self.encoding, &header, Some(slot))?;
                    }
                }
            }
            Layout::Whole | Layout::Pairs { .. } | Layout::Versions { .. } | Layout::List => {}
        }
        if found.none_seen() {
            return Err(Refusal::Missing(format!("no {} header", self.names[0])));
        }
        Ok(())
    }

    /// The parts of the content that must be computed. Collects the signatures into `found`.
    fn content<'a>(
        &self,
        arrival: &'a Arrival,
        found: &mut FoundSignatures,
    ) -> Result<Content<'a>, Refusal> {
        let beside = match self.layout {
            Layout::Whole | Layout::Pairs { .. } | Layout::Versions { .. } | Layout::List => {
                let header = needed(arrival, &self.names[0])?;
                self.collect(&header, found)?.map(str::to_owned)
            }
            Layout::Numbered | Layout::Slots => {
                self.collect_several(arrival, found)?;
                None
            }
        };
        let time = match &self.time {
            Some((TimeLocation::Header(name), _)) => needed(arrival, name)?,
            Some((TimeLocation::Pair, _)) => Cow::Owned(
                beside
                    .ok_or_else(|| Refusal::Missing("no timestamp beside the signature".into()))?,
            ),
            Some((TimeLocation::Body(_), _)) | None => Cow::Borrowed(""),
        };
        let sorted_url = match self.signs_sorted_url() {
            true => url_signature::sorted(arrival)?,
            false => Vec::new(),
        };
        Ok(Content { time, sorted_url })
    }

    fn signs_sorted_url(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, ContentPart::SortedUrl))
    }

    /// Feeds the signed content into `sink`, piece by piece.
    fn feed(&self, arrival: &Arrival, content: &Content<'_>, sink: &mut dyn FnMut(&[u8])) {
        for part in &self.parts {
            match part {
                ContentPart::Text(text) => sink(text.as_bytes()),
                ContentPart::Body => sink(&arrival.body),
                ContentPart::Time => sink(content.time.as_bytes()),
                ContentPart::Url => sink(arrival.url.as_bytes()),
                ContentPart::SortedUrl => sink(&content.sorted_url),
                ContentPart::Method => sink(arrival.method.as_str().as_bytes()),
                ContentPart::Header(name) => sink(&arrival.header(name).unwrap_or_default()),
            }
        }
    }

    /// Refuses a nonce that contains the separator: the end of a value may have moved into it.
    fn nonce_is_whole(&self, arrival: &Arrival) -> Result<(), Refusal> {
        for part in &self.parts {
            if let ContentPart::Header(name) = part
                && arrival.header(name).is_some_and(|nonce| nonce.contains(&b'.'))
            {
                return Err(Refusal::Malformed(format!("the nonce in {name} contains a \".\"")));
            }
        }
        Ok(())
    }

    /// The index of the key that made one of the signatures.
    fn signer(
        &self,
        arrival: &Arrival,
        content: &Content<'_>,
        found: &FoundSignatures,
        now: Timestamp,
    ) -> Result<usize, Refusal> {
        let mut tried = 0;
        match &self.keys {
            Keys::Hmac(keys) => {
                for (place, key) in keys::active(keys, now) {
                    tried += 1;
                    let mut context = hmac::Context::with_key(key);
                    self.feed(arrival, content, &mut |piece| context.update(piece));
                    if found.holds(context.sign().as_ref(), place) {
                        return Ok(place);
                    }
                }
            }
            Keys::Suffix(algorithm, keys) => {
                for (place, key) in keys::active(keys, now) {
                    tried += 1;
                    let mut context = digest::Context::new(algorithm);
                    self.feed(arrival, content, &mut |piece| context.update(piece));
                    context.update(key);
                    if found.holds(context.finish().as_ref(), place) {
                        return Ok(place);
                    }
                }
            }
            Keys::Public(_, keys) => {
                let mut message = Vec::with_capacity(arrival.body.len() + 64);
                self.feed(arrival, content, &mut |piece| message.extend_from_slice(piece));
                for (place, key) in keys::active(keys, now) {
                    tried += 1;
                    if found.of(place).any(|sign| key.verify_sig(&message, sign).is_ok()) {
                        return Ok(place);
                    }
                }
            }
        }
        Err(match tried {
            0 => expired(),
            1 => Refusal::Signature(
                "the signature was not made with the secret of this source".into(),
            ),
            _ => Refusal::Signature(format!(
                "the signature was made with none of the {tried} secrets of this source"
            )),
        })
    }

    fn tag(&self, arrival: &Arrival, content: &Content<'_>, place: usize) -> Option<Vec<u8>> {
        match &self.keys {
            Keys::Hmac(keys) => {
                let mut context = hmac::Context::with_key(&keys.get(place)?.key);
                self.feed(arrival, content, &mut |piece| context.update(piece));
                Some(context.sign().as_ref().to_vec())
            }
            Keys::Suffix(algorithm, keys) => {
                let key = &keys.get(place)?.key;
                let mut context = digest::Context::new(algorithm);
                self.feed(arrival, content, &mut |piece| context.update(piece));
                context.update(key);
                Some(context.finish().as_ref().to_vec())
            }
            Keys::Public(..) => None,
        }
    }
}

/// The parts of the content that are computed from the arrival.
struct Content<'a> {
    time: Cow<'a, str>,
    sorted_url: Vec<u8>,
}

impl SchemeVerifier for ComposedVerifier {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        first_missing(headers, self.headers())
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        self.check_fixed(arrival)?;
        for part in &self.parts {
            if let ContentPart::Header(name) = part {
                needed(arrival, name)?;
            }
        }
        let mut found = FoundSignatures::default();
        let content = self.content(arrival, &mut found)?;
        let mut signed_at = match &self.time {
            Some((TimeLocation::Header(_) | TimeLocation::Pair, form)) => {
                Some(read_time(*form, &content.time)?)
            }
            Some((TimeLocation::Body(_), _)) | None => None,
        };
        if found.none_well_formed() {
            return Err(Refusal::Signature(format!(
                "no well-formed signature in {}",
                self.names[0]
            )));
        }
        let secret = self.signer(arrival, &content, &found, now)?;
        if self.signs_sorted_url() {
            url_signature::check_field_boundaries(arrival, &url_signature::PLIVO)?;
            self.nonce_is_whole(arrival)?;
        }
        if let Some((TimeLocation::Body(pointer), form)) = &self.time {
            signed_at = Some(body_time(&arrival.body, pointer, *form)?);
        }
        Ok(Authentic { signed_at, secret })
    }

    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        let content = self.content(arrival, &mut FoundSignatures::default())?;
        let mut hasher = digest::Context::new(&digest::SHA256);
        self.feed(arrival, &content, &mut |piece| hasher.update(piece));
        Ok(SignedContent::Whole(finished(hasher)))
    }

    fn sign(&self, request: &Arrival, id: &str, now: Timestamp) -> Result<Signed, SignError> {
        if let Keys::Public(algorithm, _) = &self.keys {
            return Err(only_the_sender(algorithm.title()));
        }
        let mut draft = request.clone();
        let mut signed = Signed::default();
        let mut add = |draft: &mut Arrival, name: &str, value: &str| {
            if draft.headers.contains_key(name) {
                return Ok(());
            }
            let one = Signed { headers: vec![(name.into(), value.into())], ..Signed::default() };
            *draft = one.apply(draft)?;
            signed.headers.push((name.to_owned(), value.to_owned()));
            Ok(())
        };
        for (name, value) in &self.fixed {
            add(&mut draft, name, value)?;
        }
        for part in &self.parts {
            if let ContentPart::Header(name) = part {
                add(&mut draft, name, id)?;
            }
        }
        let time = match &self.time {
            Some((TimeLocation::Header(name), form)) => {
                add(&mut draft, name, &time::format(*form, now))?;
                draft.header_text(name).map(Cow::into_owned).unwrap_or_default()
            }
            Some((TimeLocation::Pair, form)) => time::format(*form, now),
            Some((TimeLocation::Body(pointer), form)) => {
                draft.body = with_time(&draft.body, pointer, *form, now)?;
                signed.body = Some(draft.body.clone());
                String::new()
            }
            None => String::new(),
        };
        let sorted_url = match self.signs_sorted_url() {
            true => {
                url_signature::sorted(&draft).map_err(|refusal| SignError(refusal.to_string()))?
            }
            false => Vec::new(),
        };
        let content = Content { time: Cow::Borrowed(&time), sorted_url };
        let places = self.keys.active(now);
        let first = *places
            .first()
            .ok_or_else(|| SignError("every secret of this source has expired".into()))?;
        let write = |place: usize| {
            let tag = self.tag(&draft, &content, place).unwrap_or_default();
            keys::encode(self.encoding, &tag)
        };
        let name = || self.names[0].to_string();
        match &self.layout {
            Layout::Whole => {
                signed.headers.push((name(), format!("{}{}", self.prefix, write(first))))
            }
            Layout::Pairs { separator, blank_after, time: label_time, label, .. } => {
                let blank = if *blank_after { " " } else { "" };
                let value =
                    format!("{label_time}={time}{separator}{blank}{label}={}", write(first));
                signed.headers.push((name(), value));
            }
            Layout::Versions { label } => {
                signed.headers.push((name(), format!("{label},{}", write(first))));
            }
            Layout::List => signed.headers.push((name(), write(first))),
            Layout::Numbered => signed.headers.push((format!("{}1", self.names[0]), write(first))),
            Layout::Slots => {
                for place in places {
                    signed.headers.push((self.names[place].to_string(), write(place)));
                }
            }
        }
        Ok(signed)
    }
}

/// Several [`ComposedVerifier`]s that differ only in the names of their headers.
pub(super) struct AlternativeVerifier(Vec<ComposedVerifier>);

impl AlternativeVerifier {
    pub(super) fn compile(
        names: &[ComposedSignature<'_>],
        spec: &SourceSpec,
    ) -> Result<Self, SchemeError> {
        names
            .iter()
            .map(|composed| ComposedVerifier::compile(composed, spec))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// The first set of header names that occurs in the request, or the first of all if none does.
    fn chosen(&self, headers: &HeaderMap) -> &ComposedVerifier {
        self.0
            .iter()
            .find(|verifier| verifier.headers().any(|name| headers.contains_key(name)))
            .unwrap_or(&self.0[0])
    }
}

impl SchemeVerifier for AlternativeVerifier {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        self.chosen(headers).missing(headers)
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        self.chosen(&arrival.headers).authenticate(arrival, now)
    }

    fn sign(&self, request: &Arrival, id: &str, now: Timestamp) -> Result<Signed, SignError> {
        self.chosen(&request.headers).sign(request, id, now)
    }

    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        self.chosen(&arrival.headers).signed_content(arrival)
    }
}

impl Keys {
    fn prepare(
        algorithm: SignatureAlgorithm,
        form: KeyForm,
        spec: &SourceSpec,
    ) -> Result<Self, SchemeError> {
        let hmac = |algorithm| {
            let key = |text: &str| Ok(hmac::Key::new(algorithm, &keys::key_bytes(form, text)?));
            keys::prepare(&spec.secrets, key).map(Self::Hmac)
        };
        let suffix = |algorithm| {
            keys::prepare(&spec.secrets, |text| keys::key_bytes(form, text))
                .map(|keys| Self::Suffix(algorithm, keys))
        };
        let public = |verification: &'static dyn signature::VerificationAlgorithm, what: &str| {
            let key = |text: &str| {
                ParsedPublicKey::new(verification, &keys::key_bytes(form, text)?[..])
                    .map_err(|_| format!("it is not {what}"))
            };
            keys::prepare(&spec.secrets, key).map(|keys| Self::Public(algorithm, keys))
        };
        match algorithm {
            SignatureAlgorithm::HmacSha1 => hmac(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY),
            SignatureAlgorithm::HmacSha256 => hmac(hmac::HMAC_SHA256),
            SignatureAlgorithm::HmacSha512 => hmac(hmac::HMAC_SHA512),
            SignatureAlgorithm::Sha1WithSuffix => suffix(&digest::SHA1_FOR_LEGACY_USE_ONLY),
            SignatureAlgorithm::Sha256WithSuffix => suffix(&digest::SHA256),
            SignatureAlgorithm::Ed25519 => {
                let key = |text: &str| {
                    let bytes = keys::key_bytes(form, text)?;
                    ed25519::public_key(&bytes).map_err(|error| error.to_string())
                };
                keys::prepare(&spec.secrets, key).map(|keys| Self::Public(algorithm, keys))
            }
            SignatureAlgorithm::EcdsaP256 => {
                public(&signature::ECDSA_P256_SHA256_ASN1, "a P-256 public key")
            }
        }
    }

    fn active(&self, now: Timestamp) -> Vec<usize> {
        match self {
            Self::Hmac(keys) => keys::active(keys, now).map(|(place, _)| place).collect(),
            Self::Suffix(_, keys) => keys::active(keys, now).map(|(place, _)| place).collect(),
            Self::Public(_, keys) => keys::active(keys, now).map(|(place, _)| place).collect(),
        }
    }
}

impl From<TimeAt<'_>> for TimeLocation {
    fn from(at: TimeAt<'_>) -> Self {
        match at {
            TimeAt::Header(name) => Self::Header(name.into()),
            TimeAt::Pair => Self::Pair,
            TimeAt::Body(pointer) => Self::Body(pointer.into()),
        }
    }
}

/// The decoded signatures of one request, on the stack.
struct FoundSignatures {
    signatures: [Signature; SIGNATURES_MAX],
    seen: usize,
    kept: usize,
}

#[derive(Clone, Copy)]
struct Signature {
    bytes: [u8; SIGNATURE_BYTES_MAX],
    length: usize,
    /// The index of the secret, if the header belongs to one secret.
    slot: Option<usize>,
}

/// The longest signature is ECDSA in DER, with 72 bytes.
const SIGNATURE_BYTES_MAX: usize = 80;

impl Default for FoundSignatures {
    fn default() -> Self {
        let blank = Signature { bytes: [0; SIGNATURE_BYTES_MAX], length: 0, slot: None };
        Self { signatures: [blank; SIGNATURES_MAX], seen: 0, kept: 0 }
    }
}

impl FoundSignatures {
    /// Adds a signature. A signature that is not well-formed is ignored, since another may be valid.
    fn push(&mut self, encoding: Encoding, text: &str, slot: Option<usize>) -> Result<(), Refusal> {
        self.seen += 1;
        if self.seen > SIGNATURES_MAX {
            return Err(Refusal::Signature(format!("more than {SIGNATURES_MAX} signatures")));
        }
        let next = &mut self.signatures[self.kept];
        if let Some(length) = keys::decode(encoding, text.as_bytes(), &mut next.bytes)
            && length > 0
        {
            (next.length, next.slot) = (length, slot);
            self.kept += 1;
        }
        Ok(())
    }

    fn none_seen(&self) -> bool {
        self.seen == 0
    }

    fn none_well_formed(&self) -> bool {
        self.kept == 0
    }

    /// The signatures that the secret at index `place` may have made.
    fn of(&self, place: usize) -> impl Iterator<Item = &[u8]> {
        self.signatures[..self.kept]
            .iter()
            .filter(move |signature| signature.slot.is_none_or(|slot| slot == place))
            .map(|signature| &signature.bytes[..signature.length])
    }

    fn holds(&self, tag: &[u8], place: usize) -> bool {
        self.of(place).any(|sign| constant_time::verify_slices_are_equal(tag, sign).is_ok())
    }
}

/// Splits content such as `{timestamp}.{body}` into its parts.
fn parts(content: &str) -> Result<Vec<ContentPart>, SchemeError> {
    let wrong = |problem: String| {
        let hint = "it may contain {body}, {timestamp}, {id}, {url}, {method} and {header:NAME}";
        SchemeError::new("scheme", problem, hint)
    };
    let mut parts = Vec::new();
    let mut rest = content;
    while let Some((text, after)) = rest.split_once('{') {
        if !text.is_empty() {
            parts.push(ContentPart::Text(text.into()));
        }
        let (name, after) = after
            .split_once('}')
            .ok_or_else(|| wrong(format!("content \"{content}\" has a {{ without its }}")))?;
        parts.push(match name {
            "body" => ContentPart::Body,
            "timestamp" => ContentPart::Time,
            "url" => ContentPart::Url,
            "sorted_url" => ContentPart::SortedUrl,
            "method" => ContentPart::Method,
            name => match name.strip_prefix("header:") {
                Some(header) if http::HeaderName::from_bytes(header.as_bytes()).is_ok() => {
                    ContentPart::Header(header.to_ascii_lowercase().into())
                }
                _ => return Err(wrong(format!("content has an unknown placeholder {{{name}}}"))),
            },
        });
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(ContentPart::Text(rest.into()));
    }
    Ok(parts)
}

fn read_time(form: TimeForm, text: &str) -> Result<Timestamp, Refusal> {
    time::parse(form, text)
        .ok_or_else(|| Refusal::Signature("the timestamp is not well-formed".into()))
}

/// The timestamp inside an authenticated body: a number, or RFC 3339 as a string.
fn body_time(body: &[u8], pointer: &str, form: TimeForm) -> Result<Timestamp, Refusal> {
    let malformed = || Refusal::Malformed(format!("no timestamp at {pointer}"));
    let body: Value = serde_json::from_slice(body).map_err(|_| malformed())?;
    let text = match (body.pointer(pointer), form) {
        (Some(Value::Number(number)), _) => number.to_string(),
        (Some(Value::String(text)), TimeForm::Rfc3339 | TimeForm::Any) => text.clone(),
        _ => return Err(malformed()),
    };
    time::parse(form, &text).ok_or_else(malformed)
}

fn with_time(
    body: &[u8],
    pointer: &str,
    form: TimeForm,
    now: Timestamp,
) -> Result<Bytes, SignError> {
    let unfit = || SignError(format!("the body must be a JSON object that can hold {pointer}"));
    let mut json: Value = serde_json::from_slice(body).map_err(|_| unfit())?;
    let (parent, name) = pointer.rsplit_once('/').ok_or_else(unfit)?;
    let parent = json.pointer_mut(parent).and_then(Value::as_object_mut).ok_or_else(unfit)?;
    let text = time::format(form, now);
    let value = match form {
        TimeForm::Rfc3339 => Value::String(text),
        TimeForm::Seconds | TimeForm::Millis | TimeForm::Any => {
            text.parse::<i64>().map(Value::from).unwrap_or(Value::String(text))
        }
    };
    parent.insert(name.to_owned(), value);
    Ok(Bytes::from(json.to_string()))
}
