//! Presets for developer platforms: code, identity, storage, media, models.

use std::time::Duration;

use super::{
    BASE, BodyFormat, HOUR, JSON, MINUTE, PUBLIC_KEY, Preset, PresetEnvelope, PresetGuard,
    PresetId, RetrySchedule, SECRET_WHSEC, hmac_body, hmac_pairs, standard, svix, with_public_key,
};
use crate::handshake::Challenge;
use crate::scheme::recipe::{
    Carrier, ComposedSignature, Encoding, Fixed, KeyForm, Recipe, SignatureAlgorithm, Time, TimeAt,
    TimeForm,
};

pub(super) const GITHUB: Preset = Preset {
    name: "github",
    title: "GitHub",
    recipe: Recipe::Composed(hmac_body("x-hub-signature-256", "sha256=", Encoding::Hex)),
    unsigned: "every header: the event's name and the id in x-github-delivery among them",
    retries: "none by itself; a redelivery keeps its id",
    envelope: PresetEnvelope {
        id: PresetId::Selector("header:x-github-delivery"),
        event_type: &["header:x-github-event", "/action"],
        body: BodyFormat::JsonOrForm,
        form_json: Some("payload"),
        ..JSON
    },
    ..BASE
};

pub(super) const GITLAB: Preset = Preset {
    name: "gitlab",
    title: "GitLab",
    recipe: Recipe::BySecret {
        prefix: "whsec_",
        with: &Recipe::Composed(standard(KeyForm::Base64Only("whsec_"))),
        without: &Recipe::Token { header: "x-gitlab-token", prefix: "" },
    },
    secret: "a signing token (whsec_ and base64), or the plain secret token",
    signed: "with a signing token: id, time and body; with a secret token: nothing, it is sent",
    unsigned: "with a secret token: everything",
    retries: "none of HTTP errors (unconfirmed); disabled after repeated failures",
    tolerance: "not documented",
    // Events that trigger each other share x-gitlab-event-uuid, so it is not an event id.
    envelope: PresetEnvelope {
        id: PresetId::FirstOf(&["header:webhook-id", "header:idempotency-key", "body"]),
        event_type: &["/object_kind", "/object_attributes/action"],
        ..JSON
    },
    ..BASE
};

pub(super) const BITBUCKET: Preset = Preset {
    name: "bitbucket",
    title: "Bitbucket Cloud",
    recipe: Recipe::Composed(hmac_body("x-hub-signature", "sha256=", Encoding::Hex)),
    unsigned: "every header: the event's name and the id in x-request-uuid among them",
    retries: "2 more (unconfirmed)",
    envelope: PresetEnvelope {
        id: PresetId::Selector("header:x-request-uuid"),
        event_type: &["header:x-event-key"],
        ..JSON
    },
    ..BASE
};

pub(super) const LINEAR: Preset = Preset {
    name: "linear",
    title: "Linear",
    recipe: Recipe::Composed(ComposedSignature {
        time: Some(Time { at: TimeAt::Body("/webhookTimestamp"), form: TimeForm::Millis }),
        ..hmac_body("linear-signature", "", Encoding::Hex)
    }),
    signed: "the body, with webhookTimestamp in it",
    unsigned: "every header, the id in linear-delivery among them",
    retries: "after 1 min, 1 h, 6 h (unconfirmed)",
    tolerance: "1 minute, past and future",
    envelope: PresetEnvelope {
        id: PresetId::Selector("header:linear-delivery"),
        event_type: &["/type", "/action"],
        occurred_at: Some("/createdAt"),
        ..JSON
    },
    // With a window of 1 minute and retries over hours, each retry must have a new timestamp.
    signs_retries_afresh: true,
    ..BASE
};

const STANDARD: Preset = Preset {
    secret: SECRET_WHSEC,
    signed: "the id and time in webhook-id and webhook-timestamp, and the body",
    unsigned: "every other header",
    tolerance: "5 minutes, past and future",
    envelope: PresetEnvelope { id: PresetId::Selector("header:webhook-id"), ..JSON },
    ..BASE
};

pub(super) const STANDARDWEBHOOKS: Preset = Preset {
    name: "standardwebhooks",
    title: "Standard Webhooks",
    recipe: Recipe::ByParam {
        param: "signing",
        choices: &[
            (
                "standard",
                Recipe::BySecret {
                    prefix: PUBLIC_KEY,
                    with: &Recipe::Composed(with_public_key(standard(KeyForm::Text))),
                    without: &Recipe::Composed(standard(KeyForm::Base64After("whsec_"))),
                },
            ),
            ("timestamped", Recipe::Composed(TIMESTAMPED)),
        ],
    },
    secret: "whsec_ and base64 of the key, or the sender's public key: whpk_ and base64",
    retries: "advised: at once, then 5 s, 5 min, 30 min, 2, 5, 10, 14, 20, 24 h",
    envelope: PresetEnvelope { occurred_at: Some("/timestamp"), ..STANDARD.envelope },
    signs_retries_afresh: true,
    ..STANDARD
};

/// The scheme that Hapax uses for endpoints with `"signing":"timestamped"`. The id is not signed.
/// While an endpoint changes from another form of signature to this one, signatures of the other
/// form come first.
const TIMESTAMPED: ComposedSignature<'static> = ComposedSignature {
    carrier: Carrier::Pairs {
        name: "webhook-signature",
        separator: ',',
        blank_after: false,
        after_others: true,
        time: "t",
        label: "v1",
        encoding: Encoding::Hex,
    },
    ..hmac_pairs("webhook-signature", Encoding::Hex, TimeForm::Seconds)
};

pub(super) const SVIX: Preset = Preset {
    name: "svix",
    title: "Svix",
    recipe: Recipe::BySecret {
        prefix: PUBLIC_KEY,
        with: &Recipe::AlternativeNames(&[
            with_public_key(svix(KeyForm::Text)),
            with_public_key(standard(KeyForm::Text)),
        ]),
        without: &Recipe::AlternativeNames(&[
            svix(KeyForm::Base64After("whsec_")),
            standard(KeyForm::Base64After("whsec_")),
        ]),
    },
    secret: "whsec_ and base64 of the key, or the sender's public key: whpk_ and base64",
    signed: "the id and time in svix-id and svix-timestamp (or webhook-…), and the body",
    retries: "at once, then 5 s, 5 min, 30 min, 2, 5, 10, 10 h",
    schedule: Some(RetrySchedule {
        waits_seconds: &[5, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 10 * HOUR],
        documented_at: "https://docs.svix.com/retries",
    }),
    envelope: PresetEnvelope {
        id: PresetId::FirstOf(&["header:svix-id", "header:webhook-id"]),
        occurred_at: Some("/timestamp"),
        ..JSON
    },
    signs_retries_afresh: true,
    ..STANDARD
};

pub(super) const CLERK: Preset = Preset {
    name: "clerk",
    title: "Clerk",
    recipe: Recipe::Composed(svix(KeyForm::Base64After("whsec_"))),
    signed: "the id and time in svix-id and svix-timestamp, and the body",
    retries: "at once, then 5 s, 5 min, 30 min, 2, 5, 10, 10 h (through Svix)",
    envelope: PresetEnvelope {
        id: PresetId::Selector("header:svix-id"),
        occurred_at: Some("/timestamp"),
        ..JSON
    },
    signs_retries_afresh: true,
    ..STANDARD
};

pub(super) const OPENAI: Preset = Preset {
    name: "openai",
    title: "OpenAI",
    recipe: Recipe::Composed(standard(KeyForm::Base64OrText("whsec_"))),
    secret: "whsec_ and base64 of the key; without whsec_ it is used as it is",
    envelope: PresetEnvelope { occurred_at: Some("/created_at"), ..STANDARD.envelope },
    ..STANDARD
};

pub(super) const REPLICATE: Preset = Preset {
    name: "replicate",
    title: "Replicate",
    recipe: Recipe::Composed(standard(KeyForm::Base64AfterLastUnderscore)),
    tolerance: "none in its library; Hapax applies its own window to the signed time",
    envelope: PresetEnvelope {
        event_type: &["/status"],
        occurred_at: Some("/completed_at"),
        ..STANDARD.envelope
    },
    ..STANDARD
};

pub(super) const LIVEBLOCKS: Preset = Preset {
    name: "liveblocks",
    title: "Liveblocks",
    recipe: Recipe::Composed(standard(KeyForm::Base64Only("whsec_"))),
    ..STANDARD
};

pub(super) const WORKOS: Preset = Preset {
    name: "workos",
    title: "WorkOS",
    recipe: Recipe::Composed(ComposedSignature {
        carrier: Carrier::Pairs {
            name: "workos-signature",
            separator: ',',
            blank_after: true,
            after_others: false,
            time: "t",
            label: "v1",
            encoding: Encoding::Hex,
        },
        ..hmac_pairs("workos-signature", Encoding::Hex, TimeForm::Millis)
    }),
    signed: "the time of sending and the body",
    unsigned: "every other header",
    tolerance: "3 minutes",
    envelope: PresetEnvelope { event_type: &["/event"], occurred_at: Some("/created_at"), ..JSON },
    ..BASE
};

pub(super) const MUX: Preset = Preset {
    name: "mux",
    title: "Mux",
    recipe: Recipe::Composed(hmac_pairs("mux-signature", Encoding::Hex, TimeForm::Seconds)),
    signed: "the time of sending and the body",
    unsigned: "every other header",
    tolerance: "5 minutes into the past; its library does not bound the future, Hapax does",
    envelope: PresetEnvelope { occurred_at: Some("/created_at"), ..JSON },
    counters: &["/attempts"],
    ..BASE
};

pub(super) const SANITY: Preset = Preset {
    name: "sanity",
    title: "Sanity",
    recipe: Recipe::Composed(hmac_pairs(
        "sanity-webhook-signature",
        Encoding::Base64Url,
        TimeForm::Millis,
    )),
    signed: "the time of sending and the body",
    unsigned: "every other header, the id in idempotency-key among them",
    retries: "2 after 429 or 5xx, 30 s apart",
    schedule: Some(RetrySchedule {
        waits_seconds: &[30, 30],
        documented_at: "https://www.sanity.io/docs/changelog/50ec6abf-fe0c-475b-ae72-314148860132",
    }),
    tolerance: "none in its library; Hapax applies its own window to the signed time",
    // The customer defines the body, which need not contain an id or a version.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &["header:idempotency-key", "/_id", "/_rev", "body"],
            within: Some(600),
        },
        event_type: &["/_type"],
        occurred_at: Some("/_updatedAt"),
        ..JSON
    },
    ..BASE
};

pub(super) const CLOUDINARY: Preset = Preset {
    name: "cloudinary",
    title: "Cloudinary",
    recipe: Recipe::ByParam {
        param: "algorithm",
        choices: &[
            ("sha1", Recipe::Composed(cloudinary(SignatureAlgorithm::Sha1WithSuffix))),
            ("sha256", Recipe::Composed(cloudinary(SignatureAlgorithm::Sha256WithSuffix))),
        ],
    },
    secret: "the API secret, used as it is",
    signed: "the body and the time in x-cld-timestamp",
    unsigned: "every other header",
    tolerance: "2 hours into the past",
    window: Some(Duration::from_secs(7_200)),
    // One request can cause several notifications, distinguished by kind, object and time.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &[
                "/request_id",
                "/notification_type",
                "/timestamp",
                "/batch_id",
                "/asset_id",
                "/public_id",
                "/version",
            ],
            within: None,
        },
        event_type: &["/notification_type"],
        occurred_at: Some("/timestamp"),
        ..JSON
    },
    ..BASE
};

const fn cloudinary(algorithm: SignatureAlgorithm) -> ComposedSignature<'static> {
    ComposedSignature {
        algorithm,
        key: KeyForm::Text,
        carrier: Carrier::Header { name: "x-cld-signature", prefix: "", encoding: Encoding::Hex },
        content: "{body}{timestamp}",
        time: Some(Time { at: TimeAt::Header("x-cld-timestamp"), form: TimeForm::Seconds }),
        fixed: &[],
    }
}

pub(super) const BOX: Preset = Preset {
    name: "box",
    title: "Box (V2)",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha256,
        key: KeyForm::Text,
        carrier: Carrier::Slots {
            names: &["box-signature-primary", "box-signature-secondary"],
            encoding: Encoding::Base64,
        },
        content: "{body}{timestamp}",
        time: Some(Time { at: TimeAt::Header("box-delivery-timestamp"), form: TimeForm::Rfc3339 }),
        fixed: &[
            ("box-signature-version", Fixed::Text("1")),
            ("box-signature-algorithm", Fixed::Text("HmacSHA256")),
        ],
    }),
    secret: "the primary key, then the secondary one, used as they are",
    signed: "the body and the time in box-delivery-timestamp",
    unsigned: "every other header, box-delivery-id among them, which changes with each retry",
    retries: "up to 12 over 2 hours (unconfirmed)",
    tolerance: "10 minutes into the past, nothing into the future",
    window: Some(Duration::from_secs(600)),
    envelope: PresetEnvelope {
        event_type: &["/trigger"],
        occurred_at: Some("/created_at"),
        ..JSON
    },
    signs_retries_afresh: true,
    ..BASE
};

pub(super) const DROPBOX: Preset = Preset {
    name: "dropbox",
    title: "Dropbox",
    recipe: Recipe::Composed(hmac_body("x-dropbox-signature", "", Encoding::Hex)),
    secret: "the app secret, used as it is",
    retries: "some, backing off (unconfirmed)",
    // A notification only announces that an account changed, with the same bytes each time. A
    // repeat is harmless and a loss is not, so equal notifications are one event only within a few
    // seconds.
    envelope: PresetEnvelope {
        id: PresetId::Hash { fields: &["body"], within: Some(10) },
        event_type: &[],
        ..JSON
    },
    guard: PresetGuard::Off,
    challenge: Some(Challenge::Dropbox),
    ..BASE
};

pub(super) const CLOUDEVENTS: Preset = Preset {
    name: "cloudevents",
    title: "CloudEvents over HTTP",
    recipe: Recipe::Token { header: "authorization", prefix: "Bearer " },
    secret: "the access token, sent as Authorization: Bearer …",
    signed: "nothing: it sends the token",
    unsigned: "everything",
    // According to the specification, source and id together identify an event, in headers or in
    // the body.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &["header:ce-source", "header:ce-id", "/source", "/id"],
            within: None,
        },
        event_type: &["header:ce-type", "/type"],
        occurred_at: Some("/time"),
        body: BodyFormat::Any,
        ..JSON
    },
    challenge: Some(Challenge::CloudEvents),
    ..BASE
};
