//! Presets for messaging, telephony, mail and social networks.

use super::{
    Ack, BASE, BodyFormat, HOUR, JSON, MINUTE, Preset, PresetEnvelope, PresetId, RetrySchedule,
    SECRET_WHSEC, hmac_body, hmac_timed, svix,
};
use crate::handshake::Challenge;
use crate::scheme::recipe::{
    Carrier, ComposedSignature, Encoding, Fixed, KeyForm, Recipe, SignatureAlgorithm, TimeForm,
};

pub(super) const SLACK: Preset = Preset {
    name: "slack",
    title: "Slack",
    recipe: Recipe::Composed(hmac_timed(
        Carrier::Header { name: "x-slack-signature", prefix: "v0=", encoding: Encoding::Hex },
        "v0:{timestamp}:{body}",
        "x-slack-request-timestamp",
        TimeForm::Seconds,
    )),
    secret: "the signing secret, used as it is",
    signed: "the time in x-slack-request-timestamp and the body",
    unsigned: "every other header",
    retries: "3: at once, after 1 min, after 5 min",
    tolerance: "5 minutes",
    // Commands and interactions are forms without an event id.
    envelope: PresetEnvelope {
        id: PresetId::FirstOf(&["/event_id", "form:trigger_id", "body"]),
        event_type: &["/event/type", "form:command"],
        occurred_at: Some("/event_time"),
        body: BodyFormat::JsonOrForm,
        ..JSON
    },
    challenge: Some(Challenge::Slack),
    ..BASE
};

pub(super) const TWILIO: Preset = Preset {
    name: "twilio",
    title: "Twilio",
    recipe: Recipe::Twilio,
    secret: "the primary auth token, used as it is",
    signed: "the full URL and the form's fields; of other bodies the SHA-256 in bodySHA256",
    unsigned: "every header, the token in i-twilio-idempotency-token among them",
    retries: "as set by connection overrides in the URL; the token stays",
    // Callbacks identify a call or message, not an event. The token of the request distinguishes them, or the
    // signed content if the token is missing.
    envelope: PresetEnvelope {
        id: PresetId::FirstOf(&["header:i-twilio-idempotency-token", "signed"]),
        event_type: &["form:StatusCallbackEvent", "form:MessageStatus", "form:CallStatus"],
        occurred_at: None,
        body: BodyFormat::JsonOrForm,
        ..JSON
    },
    ..BASE
};

pub(super) const SENDGRID: Preset = Preset {
    name: "sendgrid",
    title: "SendGrid",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::EcdsaP256,
        key: KeyForm::Base64,
        ..hmac_timed(
            Carrier::Header {
                name: "x-twilio-email-event-webhook-signature",
                prefix: "",
                encoding: Encoding::Base64,
            },
            "{timestamp}{body}",
            "x-twilio-email-event-webhook-timestamp",
            TimeForm::Seconds,
        )
    }),
    secret: "the verification key: base64 of a P-256 public key",
    signed: "the time of sending and the body",
    unsigned: "every other header",
    retries: "up to 24 hours (unconfirmed)",
    tolerance: "none in its libraries; Hapax applies its own window to the signed time",
    envelope: PresetEnvelope {
        items: Some(""),
        id: PresetId::Selector("/sg_event_id"),
        event_type: &["/event"],
        occurred_at: Some("/timestamp"),
        ..JSON
    },
    ..BASE
};

pub(super) const MAILGUN: Preset = Preset {
    name: "mailgun",
    title: "Mailgun",
    recipe: Recipe::Mailgun,
    secret: "the HTTP webhook signing key, used as it is",
    signed: "a timestamp and a one-time token",
    unsigned: "the event itself: fetch it before acting on it",
    retries: "8 hours: 5, 10, 15 min, 1, 2, 4 h; anything but 200 and 406 is tried again",
    schedule: Some(RetrySchedule {
        waits_seconds: &[5 * MINUTE, 10 * MINUTE, 15 * MINUTE, HOUR, 2 * HOUR, 4 * HOUR],
        documented_at: "https://documentation.mailgun.com/docs/mailgun/user-manual/webhooks/webhook-retries",
    }),
    tolerance: "15 minutes",
    envelope: PresetEnvelope {
        id: PresetId::Selector("/event-data/id"),
        event_type: &["/event-data/event"],
        occurred_at: Some("/event-data/timestamp"),
        ..JSON
    },
    ack: Ack::Only200,
    ..BASE
};

pub(super) const POSTMARK: Preset = Preset {
    name: "postmark",
    title: "Postmark",
    recipe: Recipe::Basic,
    secret: "user:password, as in the URL that Postmark posts to",
    signed: "nothing: it sends the credentials",
    unsigned: "everything",
    retries: "inbound: 10 over about 10.5 hours; 403 stops them",
    schedule: Some(RetrySchedule {
        waits_seconds: &[
            MINUTE,
            5 * MINUTE,
            10 * MINUTE,
            10 * MINUTE,
            10 * MINUTE,
            15 * MINUTE,
            30 * MINUTE,
            HOUR,
            2 * HOUR,
            6 * HOUR,
        ],
        documented_at: "https://postmarkapp.com/support/article/understanding-inbound-webhook-retries-in-postmark",
    }),
    // A message has many records, distinguished by kind, number and time.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &[
                "/RecordType",
                "/MessageID",
                "/ID",
                "/Type",
                "/Recipient",
                "/Email",
                "/BouncedAt",
                "/DeliveredAt",
                "/ReceivedAt",
                "/ChangedAt",
                "/OriginalLink",
            ],
            within: None,
        },
        event_type: &["/RecordType"],
        ..JSON
    },
    ..BASE
};

pub(super) const DISCORD: Preset = Preset {
    name: "discord",
    title: "Discord",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::Ed25519,
        key: KeyForm::Hex,
        ..hmac_timed(
            Carrier::Header { name: "x-signature-ed25519", prefix: "", encoding: Encoding::Hex },
            "{timestamp}{body}",
            "x-signature-timestamp",
            TimeForm::Seconds,
        )
    }),
    secret: "the application's public key, hexadecimal",
    signed: "the time of sending and the body",
    unsigned: "every other header",
    tolerance: "none in its libraries; Hapax applies its own window to the signed time",
    // Interactions have an id, webhook events have none.
    envelope: PresetEnvelope {
        id: PresetId::FirstOf(&["/id", "body"]),
        event_type: &["/event/type"],
        occurred_at: Some("/event/timestamp"),
        ..JSON
    },
    challenge: Some(Challenge::Discord),
    ..BASE
};

pub(super) const ZOOM: Preset = Preset {
    name: "zoom",
    title: "Zoom",
    recipe: Recipe::Composed(hmac_timed(
        Carrier::Header { name: "x-zm-signature", prefix: "v0=", encoding: Encoding::Hex },
        "v0:{timestamp}:{body}",
        "x-zm-request-timestamp",
        TimeForm::Seconds,
    )),
    secret: "the secret token, used as it is",
    signed: "the time in x-zm-request-timestamp and the body",
    unsigned: "every other header",
    retries: "3: after 5, 20, 60 min",
    schedule: Some(RetrySchedule {
        waits_seconds: &[5 * MINUTE, 20 * MINUTE, 60 * MINUTE],
        documented_at: "https://devsupport.zoom.us/hc/en-us/articles/360059893812-Webhook-delays",
    }),
    tolerance: "none in its library, 5 minutes advised",
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &[
                "/event",
                "/event_ts",
                "/payload/account_id",
                "/payload/object/uuid",
                "/payload/object/id",
                "/payload/object/participant/participant_uuid",
                "/payload/object/participant/user_id",
                "/payload/object/participant/id",
            ],
            within: None,
        },
        event_type: &["/event"],
        occurred_at: Some("/event_ts"),
        ..JSON
    },
    challenge: Some(Challenge::Zoom),
    ..BASE
};

pub(super) const META: Preset = Preset {
    name: "meta",
    title: "Meta (Facebook, Instagram, WhatsApp)",
    recipe: Recipe::Composed(hmac_body("x-hub-signature-256", "sha256=", Encoding::Hex)),
    secret: "the app secret, used as it is",
    retries: "at once, then less and less often over 36 hours (unconfirmed)",
    // An entry contains `changes` or `messaging`, whose bytes contain their ids and times.
    envelope: PresetEnvelope {
        items: Some("/entry"),
        id: PresetId::Hash { fields: &["outer:/object", "body"], within: None },
        event_type: &["outer:/object", "/changes/0/field"],
        occurred_at: Some("/time"),
        ..JSON
    },
    challenge: Some(Challenge::Meta),
    ..BASE
};

pub(super) const TWITCH: Preset = Preset {
    name: "twitch",
    title: "Twitch EventSub",
    recipe: Recipe::Composed(hmac_timed(
        Carrier::Header {
            name: "twitch-eventsub-message-signature",
            prefix: "sha256=",
            encoding: Encoding::Hex,
        },
        "{header:twitch-eventsub-message-id}{timestamp}{body}",
        "twitch-eventsub-message-timestamp",
        TimeForm::Rfc3339,
    )),
    secret: "10 to 100 ASCII characters, used as they are",
    signed: "the message's id and time, and the body",
    unsigned: "every other header, the type in twitch-eventsub-subscription-type among them",
    retries: "some, then the subscription is revoked",
    tolerance: "10 minutes advised (unconfirmed)",
    envelope: PresetEnvelope {
        id: PresetId::Selector("header:twitch-eventsub-message-id"),
        event_type: &["/subscription/type"],
        occurred_at: Some("header:twitch-eventsub-message-timestamp"),
        ..JSON
    },
    challenge: Some(Challenge::Twitch),
    ..BASE
};

pub(super) const X: Preset = Preset {
    name: "x",
    title: "X (Twitter)",
    recipe: Recipe::Composed(hmac_body(
        "x-twitter-webhooks-signature",
        "sha256=",
        Encoding::Base64,
    )),
    secret: "the consumer secret, used as it is",
    // There is no event id. The objects inside have ids, so the bytes identify an event.
    envelope: PresetEnvelope {
        id: PresetId::Hash { fields: &["body"], within: None },
        event_type: &[],
        ..JSON
    },
    challenge: Some(Challenge::X),
    ..BASE
};

pub(super) const LINE: Preset = Preset {
    name: "line",
    title: "LINE",
    recipe: Recipe::Composed(hmac_body("x-line-signature", "", Encoding::Base64)),
    secret: "the channel secret, used as it is",
    envelope: PresetEnvelope {
        items: Some("/events"),
        id: PresetId::Selector("/webhookEventId"),
        occurred_at: Some("/timestamp"),
        ..JSON
    },
    counters: &["/deliveryContext/isRedelivery"],
    ..BASE
};

pub(super) const RESEND: Preset = Preset {
    name: "resend",
    title: "Resend",
    recipe: Recipe::Composed(svix(KeyForm::Base64After("whsec_"))),
    secret: SECRET_WHSEC,
    signed: "the id and time in svix-id and svix-timestamp, and the body",
    unsigned: "every other header",
    retries: "at once, then 5 s, 5 min, 30 min, 2, 5, 10, 10 h",
    schedule: Some(RetrySchedule {
        waits_seconds: &[5, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 10 * HOUR],
        documented_at: "https://resend.com/docs/webhooks/retries-and-replays",
    }),
    tolerance: "5 minutes, past and future",
    envelope: PresetEnvelope {
        id: PresetId::Selector("header:svix-id"),
        occurred_at: Some("/created_at"),
        ..JSON
    },
    signs_retries_afresh: true,
    ..BASE
};

pub(super) const TELNYX: Preset = Preset {
    name: "telnyx",
    title: "Telnyx",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::Ed25519,
        key: KeyForm::Base64,
        ..hmac_timed(
            Carrier::Header {
                name: "telnyx-signature-ed25519",
                prefix: "",
                encoding: Encoding::Base64,
            },
            "{timestamp}|{body}",
            "telnyx-timestamp",
            TimeForm::Seconds,
        )
    }),
    secret: "the public key, base64",
    signed: "the time in telnyx-timestamp and the body",
    unsigned: "every other header",
    tolerance: "5 minutes, past and future",
    envelope: PresetEnvelope {
        id: PresetId::Selector("/data/id"),
        event_type: &["/data/event_type"],
        occurred_at: Some("/data/occurred_at"),
        ..JSON
    },
    counters: &["/meta/attempt", "/meta/delivered_to"],
    ..BASE
};

pub(super) const PLIVO: Preset = Preset {
    name: "plivo",
    title: "Plivo (V3)",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha256,
        key: KeyForm::Text,
        carrier: Carrier::List { name: "x-plivo-signature-v3", encoding: Encoding::Base64 },
        content: "{sorted_url}.{header:x-plivo-signature-v3-nonce}",
        time: None,
        fixed: &[],
    }),
    secret: "the auth token, used as it is",
    signed: "the full URL with its query sorted, the form's fields, and a nonce",
    unsigned: "every other header",
    // Callbacks identify a call or message, not an event. The signed content, with its nonce, distinguishes
    // them.
    envelope: PresetEnvelope {
        id: PresetId::Hash { fields: &["signed"], within: None },
        event_type: &["form:Event", "form:CallStatus", "form:Status"],
        body: BodyFormat::Form,
        ..JSON
    },
    ..BASE
};

pub(super) const PUSHER: Preset = Preset {
    name: "pusher",
    title: "Pusher Channels",
    recipe: Recipe::Composed(ComposedSignature {
        fixed: &[
            ("content-type", Fixed::Text("application/json")),
            ("x-pusher-key", Fixed::Param("key")),
        ],
        ..hmac_body("x-pusher-signature", "", Encoding::Hex)
    }),
    secret: "the app secret, used as it is; its app key goes into the parameter key",
    retries: "5 minutes, backing off",
    envelope: PresetEnvelope {
        items: Some("/events"),
        id: PresetId::Hash {
            fields: &[
                "outer:/time_ms",
                "/name",
                "/channel",
                "/event",
                "/user_id",
                "/socket_id",
                "/data",
            ],
            within: None,
        },
        event_type: &["/name"],
        occurred_at: Some("outer:/time_ms"),
        ..JSON
    },
    ..BASE
};
