//! Presets for payments and finance.

use super::{
    Ack, BASE, HOUR, JSON, MINUTE, Preset, PresetEnvelope, PresetId, RetrySchedule, SECRET_TEXT,
    hmac_body, hmac_pairs, standard,
};
use crate::handshake::Challenge;
use crate::scheme::recipe::{
    Carrier, ComposedSignature, Encoding, KeyForm, Recipe, SignatureAlgorithm, Time, TimeAt,
    TimeForm,
};

pub(super) const STRIPE: Preset = Preset {
    name: "stripe",
    title: "Stripe",
    recipe: Recipe::Composed(hmac_pairs("stripe-signature", Encoding::Hex, TimeForm::Seconds)),
    secret: "the whole text, whsec_ included; it is not decoded",
    signed: "the time of sending and the body",
    unsigned: "every other header",
    retries: "live: up to 3 days, backing off; test mode: 3 tries over a few hours",
    tolerance: "5 minutes into the past; its libraries do not bound the future, Hapax does",
    envelope: PresetEnvelope { occurred_at: Some("/created"), ..JSON },
    signs_retries_afresh: true,
    ..BASE
};

pub(super) const PAYPAL: Preset = Preset {
    name: "paypal",
    title: "PayPal",
    recipe: Recipe::PayPal,
    secret: "the webhook's id (not a secret: the certificate authenticates the sender)",
    signed: "the transmission's id and time, the webhook's id, and a CRC-32 of the body",
    unsigned: "the body itself: a CRC-32 can be forged, so fetch the object before acting on it",
    retries: "up to 25 times over 3 days (unconfirmed)",
    tolerance: "none in its library; Hapax applies its own window to the signed time",
    envelope: PresetEnvelope {
        event_type: &["/event_type"],
        occurred_at: Some("/create_time"),
        ..JSON
    },
    ..BASE
};

pub(super) const SQUARE: Preset = Preset {
    name: "square",
    title: "Square",
    recipe: Recipe::Composed(ComposedSignature {
        content: "{url}{body}",
        ..hmac_body("x-square-hmacsha256-signature", "", Encoding::Base64)
    }),
    secret: SECRET_TEXT,
    signed: "the notification URL, byte for byte as subscribed, and the body",
    retries: "up to 24 hours, backing off (unconfirmed); disabled after 3 weeks without success",
    envelope: PresetEnvelope {
        id: PresetId::Selector("/event_id"),
        occurred_at: Some("/created_at"),
        ..JSON
    },
    ..BASE
};

/// The first retries are sent 9, 18 and 27 seconds after the first attempt.
const ADYEN_SCHEDULE: RetrySchedule = RetrySchedule {
    waits_seconds: &[
        9,
        9,
        9,
        2 * MINUTE,
        5 * MINUTE,
        10 * MINUTE,
        15 * MINUTE,
        30 * MINUTE,
        HOUR,
        2 * HOUR,
        4 * HOUR,
        8 * HOUR,
    ],
    documented_at: "https://docs.adyen.com/development-resources/webhooks/troubleshoot",
};

pub(super) const ADYEN: Preset = Preset {
    name: "adyen",
    title: "Adyen (payments)",
    recipe: Recipe::Adyen,
    secret: "hexadecimal",
    signed: "of each item: pspReference, originalReference, merchantAccountCode, \
             merchantReference, amount, eventCode, success",
    unsigned: "every other field of an item (paymentMethod, eventDate, reason, …) and every header",
    retries: "3 within 27 s, then for up to 30 days: 2, 5, 10, 15, 30 min, 1, 2, 4, 8 h",
    schedule: Some(ADYEN_SCHEDULE),
    envelope: PresetEnvelope {
        items: Some("/notificationItems"),
        id: PresetId::Joined(&[
            "/NotificationRequestItem/pspReference",
            "/NotificationRequestItem/eventCode",
            "/NotificationRequestItem/success",
        ]),
        event_type: &["/NotificationRequestItem/eventCode"],
        occurred_at: Some("/NotificationRequestItem/eventDate"),
        ..JSON
    },
    ..BASE
};

pub(super) const ADYEN_PLATFORM: Preset = Preset {
    name: "adyen_platform",
    title: "Adyen (platform, management)",
    recipe: Recipe::Composed(ComposedSignature {
        key: KeyForm::Hex,
        ..hmac_body("hmacsignature", "", Encoding::Base64)
    }),
    secret: "hexadecimal",
    retries: "3 within 27 s, then for up to 30 days: 2, 5, 10, 15, 30 min, 1, 2, 4, 8 h",
    schedule: Some(ADYEN_SCHEDULE),
    // The resource alone would make one event of all its updates, so time and version distinguish the
    // updates. Webhooks of the Management API have `createdAt` instead of `timestamp`.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &[
                "/type",
                "/environment",
                "/timestamp",
                "/createdAt",
                "/data/merchantId",
                "/data/storeId",
                "/data/uniqueTerminalId",
                "/data/id",
                "/data/sequenceNumber",
                "/data/status",
                "/data/accountHolder/id",
                "/data/balanceAccount/id",
                "/data/paymentInstrument/id",
            ],
            within: None,
        },
        occurred_at: Some("/timestamp"),
        ..JSON
    },
    ..BASE
};

pub(super) const RAZORPAY: Preset = Preset {
    name: "razorpay",
    title: "Razorpay",
    recipe: Recipe::Composed(hmac_body("x-razorpay-signature", "", Encoding::Hex)),
    unsigned: "every header, the event id in x-razorpay-event-id among them",
    retries: "24 hours, backing off, then disabled; retries of older events keep the old secret",
    envelope: PresetEnvelope {
        id: PresetId::Selector("header:x-razorpay-event-id"),
        event_type: &["/event"],
        occurred_at: Some("/created_at"),
        ..JSON
    },
    ..BASE
};

pub(super) const PAYSTACK: Preset = Preset {
    name: "paystack",
    title: "Paystack",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha512,
        ..hmac_body("x-paystack-signature", "", Encoding::Hex)
    }),
    secret: "the secret API key, used as it is",
    retries: "live: every 3 min for 4 tries, then hourly for 72 hours (unconfirmed)",
    // There is no event id: the resource, its state and a time identify an event. Refunds, invoices and events of
    // customers have no `/data/id`.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &[
                "/event",
                "/data/id",
                "/data/reference",
                "/data/transaction_reference",
                "/data/refund_reference",
                "/data/amount",
                "/data/invoice_code",
                "/data/subscription_code",
                "/data/transfer_code",
                "/data/customer_code",
                "/data/customer/customer_code",
                "/data/status",
                "/data/paid_at",
                "/data/updated_at",
                "/data/updatedAt",
                "/data/created_at",
                "/data/createdAt",
            ],
            within: None,
        },
        event_type: &["/event"],
        occurred_at: Some("/data/paid_at"),
        ..JSON
    },
    ..BASE
};

pub(super) const FLUTTERWAVE: Preset = Preset {
    name: "flutterwave",
    title: "Flutterwave",
    recipe: Recipe::ByParam {
        param: "version",
        choices: &[
            ("v3", Recipe::Token { header: "verif-hash", prefix: "" }),
            ("v4", Recipe::Composed(hmac_body("flutterwave-signature", "", Encoding::Base64))),
        ],
    },
    secret: "the secret hash that you chose",
    signed: "v3: nothing, the request carries the secret; v4: the body",
    unsigned: "v3: everything; v4: every header",
    retries: "3 tries, 30 min apart (unconfirmed)",
    // Neither version is known to have an event id: resource and state identify an event.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &[
                "/webhook_id",
                "/id",
                "/event",
                "/type",
                "/data/id",
                "/data/tx_ref",
                "/data/reference",
                "/data/status",
                "/data/created_at",
                "/data/created_datetime",
            ],
            within: None,
        },
        event_type: &["/event", "/type"],
        ..JSON
    },
    ..BASE
};

pub(super) const COINBASE_COMMERCE: Preset = Preset {
    name: "coinbase_commerce",
    title: "Coinbase Commerce",
    recipe: Recipe::Composed(hmac_body("x-cc-webhook-signature", "", Encoding::Hex)),
    retries: "up to 3 days, backing off to one an hour",
    envelope: PresetEnvelope {
        id: PresetId::Selector("/event/id"),
        event_type: &["/event/type"],
        occurred_at: Some("/event/created_at"),
        ..JSON
    },
    counters: &["/attempt_number", "/scheduled_for"],
    ..BASE
};

pub(super) const PADDLE: Preset = Preset {
    name: "paddle",
    title: "Paddle Billing",
    recipe: Recipe::Composed(ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha256,
        key: KeyForm::Text,
        carrier: Carrier::Pairs {
            after_others: false,
            name: "paddle-signature",
            separator: ';',
            blank_after: false,
            time: "ts",
            label: "h1",
            encoding: Encoding::Hex,
        },
        content: "{timestamp}:{body}",
        time: Some(Time { at: TimeAt::Pair, form: TimeForm::Seconds }),
        fixed: &[],
    }),
    secret: "the whole text, pdl_ntfset_ included",
    signed: "the time of sending and the body",
    unsigned: "every other header",
    retries: "live: 60 tries over 3 days; sandbox: 3 over 15 min",
    tolerance: "5 seconds into the past",
    envelope: PresetEnvelope {
        id: PresetId::Selector("/event_id"),
        event_type: &["/event_type"],
        occurred_at: Some("/occurred_at"),
        ..JSON
    },
    // With a window of 5 seconds and retries over 3 days, each retry must be signed again.
    signs_retries_afresh: true,
    ..BASE
};

pub(super) const GOCARDLESS: Preset = Preset {
    name: "gocardless",
    title: "GoCardless",
    recipe: Recipe::Composed(hmac_body("webhook-signature", "", Encoding::Hex)),
    envelope: PresetEnvelope {
        items: Some("/events"),
        event_type: &["/resource_type", "/action"],
        occurred_at: Some("/created_at"),
        ..JSON
    },
    ..BASE
};

pub(super) const PLAID: Preset = Preset {
    name: "plaid",
    title: "Plaid",
    recipe: Recipe::Plaid,
    secret: "the secret of your API keys, to fetch its public keys; none if they are in the parameter jwks",
    signed: "the time of issue and the body's SHA-256",
    retries: "up to 24 hours (unconfirmed). A notification has no id: a retry after more than 60 s is a new event and runs again",
    tolerance: "5 minutes",
    // Nothing in the body distinguishes two equal notifications. A notification only announces a change, so
    // a repeat is harmless and a loss is not. Equal notifications are one event only within a minute.
    envelope: PresetEnvelope {
        id: PresetId::Hash { fields: &["body"], within: Some(60) },
        event_type: &["/webhook_type", "/webhook_code"],
        ..JSON
    },
    ..BASE
};

pub(super) const LEMONSQUEEZY: Preset = Preset {
    name: "lemonsqueezy",
    title: "Lemon Squeezy",
    recipe: Recipe::Composed(hmac_body("x-signature", "", Encoding::Hex)),
    retries: "3 more tries: 5, 25, 125 s (unconfirmed)",
    // The resource alone would make one event of all its updates.
    envelope: PresetEnvelope {
        id: PresetId::Hash {
            fields: &[
                "/meta/event_name",
                "/data/type",
                "/data/id",
                "/data/attributes/status",
                "/data/attributes/updated_at",
                "/data/attributes/created_at",
            ],
            within: None,
        },
        event_type: &["/meta/event_name"],
        occurred_at: Some("/data/attributes/updated_at"),
        ..JSON
    },
    ..BASE
};

pub(super) const BREX: Preset = Preset {
    name: "brex",
    title: "Brex",
    recipe: Recipe::Composed(standard(KeyForm::Base64After("whsec_"))),
    secret: "base64; several may be active at once",
    signed: "the id and time in webhook-id and webhook-timestamp, and the body",
    unsigned: "every other header",
    tolerance: "not documented",
    envelope: PresetEnvelope {
        id: PresetId::Selector("header:webhook-id"),
        event_type: &["/event_type"],
        ..JSON
    },
    ..BASE
};

pub(super) const XERO: Preset = Preset {
    name: "xero",
    title: "Xero",
    recipe: Recipe::Composed(hmac_body("x-xero-signature", "", Encoding::Base64)),
    secret: "the webhook key, used as it is although it looks like base64",
    retries: "up to 24 hours at growing intervals, then disabled",
    envelope: PresetEnvelope {
        items: Some("/events"),
        id: PresetId::Hash {
            fields: &["/tenantId", "/eventCategory", "/eventType", "/resourceId", "/eventDateUtc"],
            within: None,
        },
        event_type: &["/eventCategory", "/eventType"],
        occurred_at: Some("/eventDateUtc"),
        ..JSON
    },
    ack: Ack::Empty,
    challenge: Some(Challenge::Xero),
    ..BASE
};
