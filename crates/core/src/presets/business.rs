//! Presets for e-commerce, business and support software.

use super::{
    BASE, BodyFormat, JSON, Preset, PresetEnvelope, PresetGuard, PresetId, hmac_body, hmac_pairs,
    hmac_timed,
};
use crate::handshake::Challenge;
use crate::scheme::recipe::{
    Carrier, ComposedSignature, Encoding, KeyForm, Recipe, SignatureAlgorithm, TimeForm,
};

pub(super) const SHOPIFY: Preset = Preset {
    name: "shopify",
    title: "Shopify",
    recipe: Recipe::AlternativeNames(&[
        hmac_body("x-shopify-hmac-sha256", "", Encoding::Base64),
        hmac_body("shopify-hmac-sha256", "", Encoding::Base64),
    ]),
    secret: "the app's client secret, used as it is",
    unsigned: "every header: topic, shop, the id in x-shopify-webhook-id and the time among them",
    retries: "8 over 4 hours, with the original payload",
    envelope: PresetEnvelope {
        id: PresetId::FirstOf(&["header:x-shopify-webhook-id", "header:shopify-webhook-id"]),
        event_type: &["header:x-shopify-topic", "header:shopify-topic"],
        occurred_at: Some("header:x-shopify-triggered-at"),
        ..JSON
    },
    guard: PresetGuard::SignedAndType,
    ..BASE
};

pub(super) const WOOCOMMERCE: Preset = Preset {
    name: "woocommerce",
    title: "WooCommerce",
    recipe: Recipe::Composed(ComposedSignature {
        key: KeyForm::HtmlText,
        ..hmac_body("x-wc-webhook-signature", "", Encoding::Base64)
    }),
    secret: "text; the shop decodes HTML entities in it before it signs, and so does Hapax",
    unsigned: "every header: topic and delivery id among them",
    retries: "none; disabled after more than 5 failures in a row",
    // The shop makes the delivery id from the webhook's number and the second. So two events of one second have
    // one delivery id, and only their bodies distinguish them.
    envelope: PresetEnvelope {
        id: PresetId::Joined(&["header:x-wc-webhook-delivery-id", "body"]),
        event_type: &["header:x-wc-webhook-topic"],
        ..JSON
    },
    guard: PresetGuard::SignedAndType,
    challenge: Some(Challenge::WooCommerce),
    ..BASE
};

pub(super) const HUBSPOT: Preset = Preset {
    name: "hubspot",
    title: "HubSpot (v3)",
    recipe: Recipe::Composed(hmac_timed(
        Carrier::Header { name: "x-hubspot-signature-v3", prefix: "", encoding: Encoding::Base64 },
        "{method}{url}{body}{timestamp}",
        "x-hubspot-request-timestamp",
        TimeForm::Millis,
    )),
    secret: "the app's client secret, used as it is",
    signed: "method, full URL, body and the time in x-hubspot-request-timestamp",
    unsigned: "every other header",
    retries: "up to 10 over 24 hours (unconfirmed)",
    tolerance: "5 minutes into the past; its libraries do not bound the future, Hapax does",
    // According to HubSpot's documentation, an eventId may be used again for another event.
    envelope: PresetEnvelope {
        items: Some(""),
        id: PresetId::Joined(&["/eventId", "/subscriptionId", "/occurredAt"]),
        event_type: &["/subscriptionType"],
        occurred_at: Some("/occurredAt"),
        ..JSON
    },
    counters: &["/attemptNumber"],
    ..BASE
};

pub(super) const INTERCOM: Preset = Preset {
    name: "intercom",
    title: "Intercom",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha1,
        ..hmac_body("x-hub-signature", "sha1=", Encoding::Hex)
    }),
    secret: "the app's client secret, used as it is",
    retries: "one, after 1 min (unconfirmed); 7 days of errors suspend it",
    // The ping that Intercom sends when a webhook is set up has `"id":null`.
    envelope: PresetEnvelope {
        id: PresetId::FirstOf(&["/id", "body"]),
        event_type: &["/topic"],
        occurred_at: Some("/created_at"),
        ..JSON
    },
    counters: &["/delivery_attempts", "/delivery_status", "/delivered_at"],
    ..BASE
};

pub(super) const TYPEFORM: Preset = Preset {
    name: "typeform",
    title: "Typeform",
    recipe: Recipe::Composed(hmac_body("typeform-signature", "sha256=", Encoding::Base64)),
    retries: "429, 408, 503, 423: every 2 to 3 min for 10 hours; 410 and 404 disable it at once",
    envelope: PresetEnvelope {
        id: PresetId::Selector("/event_id"),
        event_type: &["/event_type"],
        occurred_at: Some("/form_response/submitted_at"),
        ..JSON
    },
    ..BASE
};

pub(super) const CALENDLY: Preset = Preset {
    name: "calendly",
    title: "Calendly",
    recipe: Recipe::Composed(hmac_pairs(
        "calendly-webhook-signature",
        Encoding::Hex,
        TimeForm::Seconds,
    )),
    secret: "the signing key, used as it is",
    signed: "the time of sending and the body",
    unsigned: "every other header",
    retries: "24 hours, backing off, then disabled",
    tolerance: "about 3 minutes suggested",
    // There is no event id: the type, the invitee and the time of sending identify an event.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &["/event", "/created_at", "/payload/uri", "/payload/updated_at"],
            within: None,
        },
        event_type: &["/event"],
        occurred_at: Some("/created_at"),
        ..JSON
    },
    ..BASE
};

pub(super) const DOCUSIGN: Preset = Preset {
    name: "docusign",
    title: "DocuSign Connect",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha256,
        key: KeyForm::Text,
        carrier: Carrier::Numbered { stem: "x-docusign-signature-", encoding: Encoding::Base64 },
        content: "{body}",
        time: None,
        fixed: &[],
    }),
    secret: "the HMAC key, used as it is; any of the account's keys",
    retries: "at most every 24 hours, 10 at most, where acknowledgement is required",
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &["/event", "/data/envelopeId", "/data/recipientId", "/generatedDateTime"],
            within: None,
        },
        event_type: &["/event"],
        occurred_at: Some("/generatedDateTime"),
        ..JSON
    },
    counters: &["/retryCount"],
    ..BASE
};

pub(super) const ZENDESK: Preset = Preset {
    name: "zendesk",
    title: "Zendesk",
    recipe: Recipe::Composed(hmac_timed(
        Carrier::Header {
            name: "x-zendesk-webhook-signature",
            prefix: "",
            encoding: Encoding::Base64,
        },
        "{timestamp}{body}",
        "x-zendesk-webhook-signature-timestamp",
        TimeForm::Rfc3339,
    )),
    secret: "the signing secret, used as it is",
    signed: "the time in x-zendesk-webhook-signature-timestamp and the body",
    unsigned: "every other header, the id in x-zendesk-webhook-invocation-id among them",
    retries: "on some statuses, number not documented",
    tolerance: "not documented",
    // The customer defines the body of a trigger, and its /id may be a ticket. So the header comes first.
    envelope: PresetEnvelope {
        id: PresetId::FirstOf(&["header:x-zendesk-webhook-invocation-id", "/id"]),
        occurred_at: Some("/time"),
        body: BodyFormat::Any,
        ..JSON
    },
    ..BASE
};
