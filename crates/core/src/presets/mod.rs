//! The known senders: how each signs, where its id, type and time are, and how it behaves.
//!
//! A preset is data, in the terms of [`crate::scheme::recipe`] and [`crate::envelope`]. A new sender is one more
//! constant in one of the files here, one line in [`all`], and its test vectors.

mod business;
mod messaging;
mod payments;
mod platforms;

use std::time::Duration;

use crate::envelope::{Envelope, EnvelopeSpec};
use crate::handshake::Challenge;
use crate::scheme::coverage::Coverage;
use crate::scheme::recipe::{
    Carrier, ComposedSignature, Encoding, Fixed, KeyForm, Param, Recipe, SignatureAlgorithm, Time,
    TimeAt, TimeForm,
};
use crate::scheme::secret_from;
use crate::secret::Secret;

/// One sender, described by data.
#[derive(Debug)]
pub struct Preset {
    /// The name used in the config: `stripe`.
    pub name: &'static str,
    /// The common name: `Stripe`.
    pub title: &'static str,
    /// How it signs.
    pub recipe: Recipe,
    /// The form of its secret, as text.
    pub secret: &'static str,
    /// The parts that the signature covers, as text.
    pub signed: &'static str,
    /// The parts that the signature does not cover, as text.
    pub unsigned: &'static str,
    /// How long and how often it retries, as far as that is known.
    pub retries: &'static str,
    /// The waits before each retry, if the sender documents them.
    pub schedule: Option<RetrySchedule>,
    /// The window that the sender's documentation or libraries use.
    pub tolerance: &'static str,
    /// The same window as a duration, if it is wider than the default and the key is signed.
    /// With the default, requests that the sender considers on time would be late.
    pub window: Option<Duration>,
    /// Where id, type and time are.
    pub envelope: PresetEnvelope,
    /// Whether a retry is signed again with a new timestamp. False if this is not documented; late arrivals
    /// then go to review instead of being refused.
    pub signs_retries_afresh: bool,
    /// The content that its guard covers if the id is not signed.
    pub guard: PresetGuard,
    /// JSON pointers to values that the sender changes with each attempt, such as the number of the attempt. They
    /// are relative to an event. Copies that differ in nothing else are duplicates, not conflicts. Only for
    /// senders that sign the id in the body.
    pub counters: &'static [&'static str],
    /// The answer that it requires.
    pub ack: Ack,
    /// Its handshake, if it has one.
    pub challenge: Option<Challenge>,
}

/// When a sender retries, by its own documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetrySchedule {
    /// The wait before each retry, after the attempt before it, in seconds.
    pub waits_seconds: &'static [u64],
    /// The page on which the sender documents them.
    pub documented_at: &'static str,
}

/// The content that the guard of a sender's events covers if the signed content does not
/// contain the id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PresetGuard {
    /// Everything that is signed.
    Signed,
    /// Everything that is signed, and the type, which is not signed: the same bytes are sent under several
    /// types. Every event must have a type.
    SignedAndType,
    /// Nothing: all notifications are equal, and a repeat is harmless.
    Off,
}

/// Where a sender puts id, type and time.
///
/// A selector is a JSON pointer (relative to the item if there are several, `outer:/pointer` for the whole
/// body), `header:name`, `form:Name` or `query:name`. Among hashed or joined fields, or as the last of several,
/// `body` is the hash of the item's bytes and `signed` the hash of the signed content.
#[derive(Debug, Clone, Copy)]
pub struct PresetEnvelope {
    /// JSON pointer of the array of events in a body with several (`""`: the body itself is the array). A `*`
    /// segment matches every element. A body without that array is one event.
    pub items: Option<&'static str>,
    /// The id of an event.
    pub id: PresetId,
    /// The selectors of the type. The values of several are joined with `.`; with
    /// [`PresetGuard::SignedAndType`] only the first that is present counts.
    pub event_type: &'static [&'static str],
    /// The selector of the time: unix s, ms, float s or RFC 3339, distinguished by magnitude and shape.
    pub occurred_at: Option<&'static str>,
    /// The format of the body.
    pub body: BodyFormat,
    /// The field of a form that contains the JSON that is otherwise the body.
    pub form_json: Option<&'static str>,
}

/// The value that identifies an event among all events of its sender.
#[derive(Debug, Clone, Copy)]
pub enum PresetId {
    /// The sender's own id.
    Selector(&'static str),
    /// The first that is present.
    FirstOf(&'static [&'static str]),
    /// All parts, joined.
    Joined(&'static [&'static str]),
    /// The sender has no id for each event: a hash of stable fields replaces it.
    Hash {
        /// The fields; a missing one counts as absent.
        fields: &'static [&'static str],
        /// Equal hashes are one event only within this many seconds.
        within: Option<u64>,
    },
}

/// The format of a sender's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyFormat {
    /// JSON. Any other body is malformed.
    Json,
    /// An urlencoded form.
    Form,
    /// JSON if it begins like JSON, and an urlencoded form otherwise. The content type does not decide: no sender
    /// signs it.
    JsonOrForm,
    /// Any body. A body that is valid JSON is read as JSON.
    Any,
}

/// The answer that a sender requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ack {
    /// 200 or 202 with a JSON body.
    #[default]
    Plain,
    /// 200 with an empty body.
    Empty,
    /// Always 200, never 202, which this sender counts as a failure.
    Only200,
}

impl Preset {
    /// Whether `hapax sign` and `hapax send` can sign for this sender.
    pub fn can_sign(&self) -> bool {
        self.recipe.can_sign()
    }

    /// Whether a source of this sender needs a secret. The others verify with parameters alone.
    pub fn needs_secret(&self) -> bool {
        self.recipe.needs_secret()
    }

    /// Whether the full public URL is signed.
    pub fn signs_url(&self) -> bool {
        self.recipe.signs_url()
    }

    /// The parameters that a source of this sender must or may set.
    pub fn params(&self) -> &'static [Param] {
        const VERIFY_TOKEN: &[Param] = &[Param {
            name: "verify_token",
            required: false,
            meaning: "the token that its handshake sends; without it no handshake succeeds",
        }];
        if self.challenge == Some(Challenge::Meta) { VERIFY_TOKEN } else { self.recipe.params() }
    }

    /// How it signs, in one line.
    pub fn scheme(&self) -> String {
        self.recipe.describe()
    }

    /// How a replay under another id is recognised, or why it is not, in one line.
    pub fn guarded(&'static self) -> String {
        let Ok(envelope) = Envelope::build(Some(&self.envelope), &EnvelopeSpec::default()) else {
            return String::new();
        };
        if self.guard == PresetGuard::Off {
            return "no: this sender repeats equal notifications, and a repeat is harmless"
                .to_owned();
        }
        let coverage = Coverage::of(&self.recipe);
        let signing: Vec<&Coverage> =
            coverage.iter().filter(|coverage| coverage.signs_something()).collect();
        let words = if signing.is_empty() {
            "no: nothing is signed".to_owned()
        } else if signing.iter().all(|coverage| !envelope.needs_guard(coverage)) {
            "not needed: the id is signed".to_owned()
        } else {
            let what = match self.guard {
                PresetGuard::SignedAndType => "the type and what is signed",
                PresetGuard::Signed | PresetGuard::Off => "what is signed",
            };
            let kept = match signing.iter().all(|coverage| coverage.signs_time()) {
                true => "kept for twice the window",
                false => "kept as long as the keys",
            };
            match signing.iter().all(|coverage| envelope.needs_guard(coverage)) {
                true => format!("by {what}, {kept}"),
                false => format!("not needed where the id is signed; else by {what}, {kept}"),
            }
        };
        match signing.len() < coverage.len() && !signing.is_empty() {
            true => format!("{words}; with a shared token no: nothing is signed"),
            false => words,
        }
    }

    /// Writes `random` as a secret of this sender, for development. `None` if only the sender has the private
    /// key.
    pub fn secret_from(&self, random: &[u8; 32]) -> Option<Secret> {
        secret_from(&self.recipe, random)
    }
}

/// The preset of that name.
pub fn find(name: &str) -> Option<&'static Preset> {
    let place = ALL.binary_search_by(|preset| preset.name.cmp(name)).ok()?;
    ALL.get(place)
}

/// All presets, by name.
pub fn all() -> &'static [Preset] {
    ALL
}

/// The preset whose name is closest to a mistyped one.
pub fn nearest(name: &str) -> Option<&'static str> {
    let plain: String =
        name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    let distance = |preset: &Preset| edits(&plain, &preset.name.replace('_', ""));
    let (near, steps) =
        ALL.iter().map(|preset| (preset.name, distance(preset))).min_by_key(|(_, steps)| *steps)?;
    // At most a third of the letters may differ; beyond that a suggestion would be a guess.
    (steps <= plain.len() / 3).then_some(near)
}

/// The edit distance: how many letters must be inserted, removed or changed.
pub(crate) fn edits(from: &str, to: &str) -> usize {
    let to = to.as_bytes();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, letter) in from.bytes().enumerate() {
        let mut corner = row[0];
        row[0] = line + 1;
        for column in 1..=to.len() {
            let change = corner + usize::from(letter != to[column - 1]);
            corner = row[column];
            row[column] = change.min(row[column] + 1).min(row[column - 1] + 1);
        }
    }
    row[to.len()]
}

static ALL: &[Preset] = &[
    payments::ADYEN,
    payments::ADYEN_PLATFORM,
    platforms::BITBUCKET,
    platforms::BOX,
    payments::BREX,
    business::CALENDLY,
    platforms::CLERK,
    platforms::CLOUDEVENTS,
    platforms::CLOUDINARY,
    payments::COINBASE_COMMERCE,
    messaging::DISCORD,
    business::DOCUSIGN,
    platforms::DROPBOX,
    payments::FLUTTERWAVE,
    platforms::GITHUB,
    platforms::GITLAB,
    payments::GOCARDLESS,
    business::HUBSPOT,
    business::INTERCOM,
    payments::LEMONSQUEEZY,
    messaging::LINE,
    platforms::LINEAR,
    platforms::LIVEBLOCKS,
    messaging::MAILGUN,
    messaging::META,
    platforms::MUX,
    platforms::OPENAI,
    payments::PADDLE,
    payments::PAYPAL,
    payments::PAYSTACK,
    payments::PLAID,
    messaging::PLIVO,
    messaging::POSTMARK,
    messaging::PUSHER,
    payments::RAZORPAY,
    platforms::REPLICATE,
    messaging::RESEND,
    platforms::SANITY,
    messaging::SENDGRID,
    business::SHOPIFY,
    messaging::SLACK,
    payments::SQUARE,
    platforms::STANDARDWEBHOOKS,
    payments::STRIPE,
    platforms::SVIX,
    messaging::TELNYX,
    messaging::TWILIO,
    messaging::TWITCH,
    business::TYPEFORM,
    business::WOOCOMMERCE,
    platforms::WORKOS,
    messaging::X,
    payments::XERO,
    business::ZENDESK,
    messaging::ZOOM,
];

/// The values that most presets share. Each constant sets the ones that differ.
const BASE: Preset = Preset {
    name: "",
    title: "",
    recipe: Recipe::Basic,
    secret: "text, used as it is",
    signed: "the body",
    unsigned: "every header, and so the time of sending",
    retries: "not documented",
    schedule: None,
    tolerance: "none: no time is signed",
    window: None,
    envelope: JSON,
    signs_retries_afresh: false,
    guard: PresetGuard::Signed,
    counters: &[],
    ack: Ack::Plain,
    challenge: None,
};

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;

/// A JSON body with one event.
const JSON: PresetEnvelope = PresetEnvelope {
    items: None,
    id: PresetId::Selector("/id"),
    event_type: &["/type"],
    occurred_at: None,
    body: BodyFormat::Json,
    form_json: None,
};

const SECRET_TEXT: &str = "text, used as it is";
const SECRET_WHSEC: &str = "whsec_ and base64 of the key";

/// HMAC-SHA256 over the raw body in one header.
const fn hmac_body(
    name: &'static str,
    prefix: &'static str,
    encoding: Encoding,
) -> ComposedSignature<'static> {
    ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha256,
        key: KeyForm::Text,
        carrier: Carrier::Header { name, prefix, encoding },
        content: "{body}",
        time: None,
        fixed: NONE_FIXED,
    }
}

/// HMAC-SHA256 in one header, over content with a timestamp from another header.
const fn hmac_timed(
    carrier: Carrier<'static>,
    content: &'static str,
    time_header: &'static str,
    form: TimeForm,
) -> ComposedSignature<'static> {
    ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha256,
        key: KeyForm::Text,
        carrier,
        content,
        time: Some(Time { at: TimeAt::Header(time_header), form }),
        fixed: NONE_FIXED,
    }
}

/// `t=…,v1=…` over `{timestamp}.{body}`.
const fn hmac_pairs(
    name: &'static str,
    encoding: Encoding,
    form: TimeForm,
) -> ComposedSignature<'static> {
    ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha256,
        key: KeyForm::Text,
        carrier: Carrier::Pairs {
            name,
            separator: ',',
            blank_after: false,
            after_others: false,
            time: "t",
            label: "v1",
            encoding,
        },
        content: "{timestamp}.{body}",
        time: Some(Time { at: TimeAt::Pair, form }),
        fixed: NONE_FIXED,
    }
}

/// Standard Webhooks under its own header names.
const fn standard(key: KeyForm) -> ComposedSignature<'static> {
    standard_named(
        key,
        "webhook-signature",
        "{header:webhook-id}.{timestamp}.{body}",
        "webhook-timestamp",
    )
}

/// Standard Webhooks with the sender's public key, under its own header names or Svix's.
const fn with_public_key(named: ComposedSignature<'static>) -> ComposedSignature<'static> {
    let name = match named.carrier {
        Carrier::Versions { name, .. } => name,
        _other => panic!("signatures of Standard Webhooks have a version"),
    };
    ComposedSignature {
        algorithm: SignatureAlgorithm::Ed25519,
        key: KeyForm::Base64Only(PUBLIC_KEY),
        carrier: Carrier::Versions { name, label: "v1a", encoding: Encoding::Base64 },
        ..named
    }
}

/// The prefix of public keys of Standard Webhooks.
const PUBLIC_KEY: &str = "whpk_";

/// Standard Webhooks under Svix's header names.
const fn svix(key: KeyForm) -> ComposedSignature<'static> {
    standard_named(key, "svix-signature", "{header:svix-id}.{timestamp}.{body}", "svix-timestamp")
}

const fn standard_named(
    key: KeyForm,
    name: &'static str,
    content: &'static str,
    time_header: &'static str,
) -> ComposedSignature<'static> {
    ComposedSignature {
        algorithm: SignatureAlgorithm::HmacSha256,
        key,
        carrier: Carrier::Versions { name, label: "v1", encoding: Encoding::Base64 },
        content,
        time: Some(Time { at: TimeAt::Header(time_header), form: TimeForm::Seconds }),
        fixed: NONE_FIXED,
    }
}

const NONE_FIXED: &[(&str, Fixed<'static>)] = &[];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_sorted_and_none_is_there_twice() {
        assert!(ALL.is_sorted_by(|one, next| one.name < next.name));
        assert_eq!(ALL.len(), 55);
        for preset in ALL {
            assert_eq!(find(preset.name).map(|found| found.title), Some(preset.title));
        }
        assert!(find("nobody").is_none());
    }

    #[test]
    fn every_preset_has_its_documentation() {
        for preset in ALL {
            let Preset { name, title, secret, signed, unsigned, retries, tolerance, .. } = preset;
            for text in [title, secret, signed, unsigned, retries, tolerance] {
                assert!(!text.is_empty(), "{name}");
            }
            assert!(preset.scheme().len() > 10, "{name}");
        }
    }

    #[test]
    fn a_mistyped_name_finds_its_neighbour_and_noise_does_not() {
        for (typed, meant) in [
            ("strpe", Some("stripe")),
            ("Stripe", Some("stripe")),
            ("git-hub", Some("github")),
            ("adyen-platform", Some("adyen_platform")),
            ("standard_webhooks", Some("standardwebhooks")),
            ("shoppify", Some("shopify")),
            ("qqqqqqqqqq", None),
            ("", None),
        ] {
            assert_eq!(nearest(typed), meant, "{typed}");
        }
    }
}
