//! Senders that put their signature into the body: Adyen in each item, Mailgun beside the event. The
//! body is parsed strictly: a repeated field is refused, so that no other parser sees a value that was
//! not checked.

use aws_lc_rs::{constant_time, hmac};
use bytes::Bytes;
use http::HeaderMap;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::keys::{self, ExpiringKey};
use super::recipe::{Encoding, KeyForm, TimeForm};
use super::{
    Authentic, SchemeError, SchemeVerifier, SignError, Signed, SignedContent, expired, time,
};
use crate::arrival::Arrival;
use crate::limits::ITEMS_MAX;
use crate::source::SourceSpec;
use crate::verify::Refusal;

fn hmac_keys(spec: &SourceSpec, form: KeyForm) -> Result<Vec<ExpiringKey<hmac::Key>>, SchemeError> {
    keys::prepare(&spec.secrets, |text| {
        Ok(hmac::Key::new(hmac::HMAC_SHA256, &keys::key_bytes(form, text)?))
    })
}

/// The index of the key that signed `content`.
fn signer(
    keys: &[ExpiringKey<hmac::Key>],
    content: &[&[u8]],
    encoding: Encoding,
    signature: &str,
    now: Timestamp,
) -> Result<usize, Refusal> {
    let mut given = [0; 48];
    let length = keys::decode(encoding, signature.as_bytes(), &mut given)
        .ok_or_else(|| Refusal::Signature("the signature is not well-formed".into()))?;
    let mut tried = 0;
    for (place, key) in keys::active(keys, now) {
        tried += 1;
        let tag = tag(key, content);
        if constant_time::verify_slices_are_equal(tag.as_ref(), &given[..length]).is_ok() {
            return Ok(place);
        }
    }
    match tried {
        0 => Err(expired()),
        _ => Err(Refusal::Signature(
            "the signature was not made with the secret of this source".into(),
        )),
    }
}

fn tag(key: &hmac::Key, content: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    content.iter().for_each(|piece| context.update(piece));
    context.sign()
}

fn first_key(keys: &[ExpiringKey<hmac::Key>], now: Timestamp) -> Result<&hmac::Key, SignError> {
    keys::active(keys, now)
        .next()
        .map(|(_, key)| key)
        .ok_or_else(|| SignError("every secret of this source has expired".into()))
}

/// Adyen's payments: every item carries its own HMAC. One wrong HMAC refuses the whole request.
pub(super) struct AdyenVerifier {
    keys: Vec<ExpiringKey<hmac::Key>>,
}

#[derive(Deserialize)]
struct AdyenBody<'a> {
    #[serde(rename = "notificationItems", borrow)]
    items: Vec<AdyenItem<'a>>,
}

#[derive(Deserialize)]
struct AdyenItem<'a> {
    #[serde(rename = "NotificationRequestItem", borrow)]
    item: AdyenFields<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AdyenFields<'a> {
    psp_reference: String,
    original_reference: Option<String>,
    merchant_account_code: String,
    merchant_reference: Option<String>,
    #[serde(borrow)]
    amount: AdyenAmount<'a>,
    event_code: String,
    success: Flag,
    additional_data: Option<AdyenExtra>,
}

/// `"true"` as Adyen sends it, or `true` as in its documentation. Both are signed alike.
#[derive(Deserialize)]
#[serde(untagged)]
enum Flag {
    Text(String),
    Bare(bool),
}

impl Flag {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Bare(true) => "true",
            Self::Bare(false) => "false",
        }
    }
}

#[derive(Deserialize)]
struct AdyenAmount<'a> {
    #[serde(borrow)]
    value: &'a RawValue,
    currency: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AdyenExtra {
    hmac_signature: Option<String>,
}

impl AdyenFields<'_> {
    /// The fields in the order in which they are signed. The `:` between two fields is not escaped, so bytes
    /// could move from one field to the next under the same signature. So only the merchant's own
    /// reference may contain a `:`.
    fn content(&self) -> Result<String, Refusal> {
        let value = self.amount.value.get();
        let plain = [
            &self.psp_reference,
            self.original_reference.as_deref().unwrap_or_default(),
            &self.merchant_account_code,
            value,
            &self.amount.currency,
            &self.event_code,
            self.success.text(),
        ];
        if plain.iter().any(|field| field.contains(':')) {
            return Err(Refusal::Signature("a signed field contains a colon".into()));
        }
        if !value.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-') {
            return Err(Refusal::Signature("the amount is not an integer".into()));
        }
        let [psp, original, account, value, currency, event, success] = plain;
        let reference = self.merchant_reference.as_deref().unwrap_or_default();
        Ok(format!("{psp}:{original}:{account}:{reference}:{value}:{currency}:{event}:{success}"))
    }
}

impl AdyenVerifier {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        Ok(Self { keys: hmac_keys(spec, KeyForm::Hex)? })
    }
}

fn adyen_body(body: &[u8]) -> Result<AdyenBody<'_>, Refusal> {
    serde_json::from_slice(body)
        .map_err(|_| Refusal::Signature("the body contains no notification items".into()))
}

impl SchemeVerifier for AdyenVerifier {
    fn missing<'a>(&'a self, _headers: &HeaderMap) -> Option<&'a str> {
        None
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let AdyenBody { items } = adyen_body(&arrival.body)?;
        if items.is_empty() {
            return Err(Refusal::Missing(
                "the body has no items, and therefore no signature".into(),
            ));
        }
        if items.len() > ITEMS_MAX {
            return Err(Refusal::Malformed(format!("more than {ITEMS_MAX} items")));
        }
        let mut first = None;
        for AdyenItem { item } in &items {
            let signature = item
                .additional_data
                .as_ref()
                .and_then(|extra| extra.hmac_signature.as_deref())
                .ok_or_else(|| Refusal::Missing("no additionalData.hmacSignature".into()))?;
            let content = item.content()?;
            let secret =
                signer(&self.keys, &[content.as_bytes()], Encoding::Base64, signature, now)?;
            first.get_or_insert(secret);
        }
        Ok(Authentic { signed_at: None, secret: first.unwrap_or_default() })
    }

    fn sign(&self, request: &Arrival, _id: &str, now: Timestamp) -> Result<Signed, SignError> {
        let unfit = || SignError("the body is not a list of Adyen's notification items".into());
        let key = first_key(&self.keys, now)?;
        let AdyenBody { items } = adyen_body(&request.body).map_err(|_| unfit())?;
        let mut body: Value = serde_json::from_slice(&request.body).map_err(|_| unfit())?;
        for (place, AdyenItem { item }) in items.iter().enumerate() {
            let content = item.content().map_err(|refusal| SignError(refusal.to_string()))?;
            let signature =
                keys::encode(Encoding::Base64, tag(key, &[content.as_bytes()]).as_ref());
            let fields = body
                .pointer_mut(&format!("/notificationItems/{place}/NotificationRequestItem"))
                .and_then(Value::as_object_mut)
                .ok_or_else(unfit)?;
            let extra = fields.entry("additionalData").or_insert_with(|| json!({}));
            extra
                .as_object_mut()
                .ok_or_else(unfit)?
                .insert("hmacSignature".into(), signature.into());
        }
        Ok(Signed { body: Some(Bytes::from(body.to_string())), ..Signed::default() })
    }

    /// Each item separately: items can be moved from one request into another.
    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        let AdyenBody { items } = adyen_body(&arrival.body)?;
        let of = |AdyenItem { item }: &AdyenItem<'_>| {
            Ok(SignedContent::hash([item.content()?.as_bytes()]))
        };
        items.iter().map(of).collect::<Result<_, _>>().map(SignedContent::Items)
    }
}

/// Mailgun: a timestamp and a token are signed. The event is not.
pub(super) struct MailgunVerifier {
    keys: Vec<ExpiringKey<hmac::Key>>,
}

#[derive(Deserialize)]
struct MailgunBody<'a> {
    #[serde(borrow)]
    signature: MailgunSignature<'a>,
}

#[derive(Deserialize)]
struct MailgunSignature<'a> {
    /// A string of digits, or a number. Its literal text was signed.
    #[serde(borrow)]
    timestamp: &'a RawValue,
    token: String,
    signature: String,
}

impl MailgunSignature<'_> {
    fn stamp(&self) -> &str {
        let raw = self.timestamp.get();
        raw.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(raw)
    }
}

fn mailgun_signature(body: &[u8]) -> Result<MailgunSignature<'_>, Refusal> {
    let MailgunBody { signature } = serde_json::from_slice(body)
        .map_err(|_| Refusal::Missing("no signature in the body".into()))?;
    Ok(signature)
}

impl MailgunVerifier {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        Ok(Self { keys: hmac_keys(spec, KeyForm::Text)? })
    }
}

impl SchemeVerifier for MailgunVerifier {
    fn missing<'a>(&'a self, _headers: &HeaderMap) -> Option<&'a str> {
        None
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let signature = mailgun_signature(&arrival.body)?;
        let stamp = signature.stamp();
        let signed_at = time::parse(TimeForm::Seconds, stamp)
            .ok_or_else(|| Refusal::Signature("the timestamp is not well-formed".into()))?;
        let content = [stamp.as_bytes(), signature.token.as_bytes()];
        let secret = signer(&self.keys, &content, Encoding::Hex, &signature.signature, now)?;
        Ok(Authentic { signed_at: Some(signed_at), secret })
    }

    fn sign(&self, request: &Arrival, id: &str, now: Timestamp) -> Result<Signed, SignError> {
        let unfit = || SignError("the body is not a JSON object".into());
        let key = first_key(&self.keys, now)?;
        let mut body: Value = serde_json::from_slice(&request.body).map_err(|_| unfit())?;
        let stamp = time::format(TimeForm::Seconds, now);
        let token =
            hex::encode(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, id.as_bytes()));
        let token = &token[..50];
        let tag = tag(key, &[stamp.as_bytes(), token.as_bytes()]);
        let signature = keys::encode(Encoding::Hex, tag.as_ref());
        body.as_object_mut().ok_or_else(unfit)?.insert(
            "signature".to_owned(),
            json!({ "timestamp": stamp, "token": token, "signature": signature }),
        );
        Ok(Signed { body: Some(Bytes::from(body.to_string())), ..Signed::default() })
    }

    /// The one-time token and the time. The event is not signed.
    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        let signature = mailgun_signature(&arrival.body)?;
        Ok(SignedContent::whole([signature.stamp().as_bytes(), signature.token.as_bytes()]))
    }
}
