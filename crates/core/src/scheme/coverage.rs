//! Which parts of a request a scheme signs. Whether an id, a type or a tenant can be believed, and
//! whether an event needs a guard, follows from this alone: neither a preset nor a config says it.

use super::recipe::{ComposedSignature, Recipe, TimeAt};
use crate::envelope::Origin;

/// What one set of header names of a scheme signs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    body: BodyCovered,
    url: bool,
    time: bool,
    /// Headers that are signed. The scheme refuses a request without them.
    headers: Vec<Box<str>>,
    /// Headers that are certainly missing wherever this set of names applies.
    missing: Vec<Box<str>>,
    /// Whether the end of each signed header is fixed by what follows it in the signed content.
    cuts_are_fixed: bool,
    /// Whether the signed content can be cut into its parts in one way only, as far as it is no JSON.
    has_one_reading: bool,
}

/// How much of the body is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyCovered {
    /// Its bytes.
    Bytes,
    /// The decoded fields of a form, in any order and spelling.
    Fields,
    /// Of each item these fields, by their JSON pointers.
    Pointers(&'static [&'static str]),
    /// Nothing that tells one body from another.
    Nothing,
}

/// Whether a value is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Covered {
    /// It is.
    Yes,
    /// It is, and a request without it is refused.
    Always,
    /// It cannot be there.
    Missing,
    /// Anybody can change it.
    No,
}

impl Coverage {
    fn new(body: BodyCovered) -> Self {
        Self {
            body,
            url: false,
            time: false,
            headers: Vec::new(),
            missing: Vec::new(),
            cuts_are_fixed: true,
            has_one_reading: true,
        }
    }

    /// What each set of header names of `recipe` signs; of a recipe with a choice, all choices.
    pub(crate) fn of(recipe: &Recipe) -> Vec<Self> {
        match recipe {
            Recipe::Composed(composed) => vec![Self::of_composed(composed)],
            Recipe::AlternativeNames(names) => {
                let mut all: Vec<Self> = Vec::new();
                let mut earlier: Vec<Box<str>> = Vec::new();
                for composed in *names {
                    let coverage = Self::of_composed(composed);
                    let own = coverage.headers.clone();
                    all.push(Self { missing: earlier.clone(), ..coverage });
                    // A later set counts only where no header of an earlier one is there.
                    earlier.extend(own);
                }
                all
            }
            Recipe::BySecret { with, without, .. } => [Self::of(with), Self::of(without)].concat(),
            Recipe::ByParam { choices, .. } => {
                choices.iter().flat_map(|(_, recipe)| Self::of(recipe)).collect()
            }
            Recipe::Twilio => {
                vec![Self { url: true, has_one_reading: false, ..Self::new(BodyCovered::Fields) }]
            }
            Recipe::Adyen => vec![Self::new(BodyCovered::Pointers(ADYEN))],
            Recipe::Mailgun => vec![Self { time: true, ..Self::new(BodyCovered::Nothing) }],
            // A CRC-32 is no proof of the body.
            Recipe::PayPal => vec![Self {
                time: true,
                headers: vec!["paypal-transmission-id".into(), "paypal-transmission-time".into()],
                ..Self::new(BodyCovered::Nothing)
            }],
            Recipe::Plaid => vec![Self { time: true, ..Self::new(BodyCovered::Bytes) }],
            Recipe::Token { .. } | Recipe::Basic => vec![Self::new(BodyCovered::Nothing)],
        }
    }

    /// What a composed content signs.
    pub(super) fn of_composed(composed: &ComposedSignature<'_>) -> Self {
        let content = composed.content;
        let body = match (content.contains("{body}"), content.contains("{sorted_url}")) {
            (true, _) => BodyCovered::Bytes,
            (false, true) => BodyCovered::Fields,
            (false, false) => BodyCovered::Nothing,
        };
        let mut headers: Vec<Box<str>> = content
            .split("{header:")
            .skip(1)
            .filter_map(|rest| Some(rest.split_once('}')?.0.to_ascii_lowercase().into()))
            .collect();
        if let Some(TimeAt::Header(name)) = composed.time.map(|time| time.at) {
            headers.push(name.to_ascii_lowercase().into());
        }
        Self {
            url: content.contains("url}"),
            time: composed.time.is_some(),
            headers,
            has_one_reading: !content.contains("{sorted_url}"),
            ..Self::new(body)
        }
    }

    /// The same where the content is the config's own: bytes may move from a signed header into
    /// what stands beside it, so that one signature fits several ids.
    pub(super) fn with_loose_cuts(self, content: &str) -> Self {
        Self { cuts_are_fixed: false, has_one_reading: has_one_reading(content), ..self }
    }

    /// Whether anything at all is signed.
    pub fn signs_something(&self) -> bool {
        self.url || self.time || self.body != BodyCovered::Nothing || !self.headers.is_empty()
    }

    /// Whether a time is signed.
    pub fn signs_time(&self) -> bool {
        self.time
    }

    /// How much of the body is signed.
    pub fn body(&self) -> BodyCovered {
        self.body
    }

    /// Whether a value from there is signed.
    pub fn covers(&self, origin: Origin<'_>) -> Covered {
        let signed = match origin {
            Origin::Signed => self.signs_something(),
            Origin::Body => self.body == BodyCovered::Bytes,
            Origin::Pointer(text) => match self.body {
                BodyCovered::Bytes => true,
                BodyCovered::Pointers(signed) => signed.contains(&text),
                BodyCovered::Fields | BodyCovered::Nothing => false,
            },
            Origin::Field => matches!(self.body, BodyCovered::Bytes | BodyCovered::Fields),
            Origin::Query => self.url,
            Origin::Header(name) => {
                let is =
                    |known: &[Box<str>]| known.iter().any(|known| known.eq_ignore_ascii_case(name));
                return match (is(&self.headers), is(&self.missing)) {
                    (true, _) => Covered::Always,
                    (false, true) => Covered::Missing,
                    (false, false) => Covered::No,
                };
            }
        };
        if signed { Covered::Yes } else { Covered::No }
    }

    /// Whether one signature fits one value from there and no other.
    pub fn fixes(&self, origin: Origin<'_>) -> Covered {
        match (self.covers(origin), origin) {
            (Covered::Always, Origin::Header(_)) if !self.cuts_are_fixed => Covered::No,
            (Covered::Yes, Origin::Query | Origin::Field | Origin::Body)
                if !self.has_one_reading =>
            {
                Covered::No
            }
            (covered, _) => covered,
        }
    }

    /// Whether a value from there is signed, and none of its bytes can come from beside it. A value
    /// inside JSON is: bytes that moved in from outside would make the body no JSON.
    pub fn is_certain(&self, origin: Origin<'_>) -> bool {
        let is_signed = matches!(self.covers(origin), Covered::Yes | Covered::Always);
        let is_apart = match origin {
            Origin::Pointer(_) => true,
            // Twilio and Plivo sign fields without separators; what has moved between them is refused.
            Origin::Field => self.body == BodyCovered::Fields,
            Origin::Header(_) | Origin::Query | Origin::Body | Origin::Signed => false,
        };
        is_signed && (self.has_one_reading || is_apart)
    }
}

/// Whether content that the config composes has one reading. A timestamp cannot take bytes from beside
/// it, or give some away, without leaving the window. One header before it, with a separator on both
/// sides, has a fixed end too; a URL, or a header anywhere else, has not.
fn has_one_reading(content: &str) -> bool {
    let headers = content.matches("{header:").count();
    if content.contains("url}") {
        return false;
    }
    match (headers, content.strip_prefix("{header:").and_then(|rest| rest.split_once('}'))) {
        (0, _) => true,
        (1, Some((_, rest))) => {
            let between = |rest: &str, next: &str| rest.find(next).is_some_and(|at| at > 0);
            let after_time = rest.split_once("{timestamp}").map(|(_, after)| after);
            between(rest, "{timestamp}")
                && after_time
                    .is_some_and(|after| between(after, "{body}") && after.ends_with("{body}"))
        }
        (_, _) => false,
    }
}

/// What Adyen signs of an item.
const ADYEN: &[&str] = &[
    "/NotificationRequestItem/pspReference",
    "/NotificationRequestItem/originalReference",
    "/NotificationRequestItem/merchantAccountCode",
    "/NotificationRequestItem/merchantReference",
    "/NotificationRequestItem/amount/value",
    "/NotificationRequestItem/amount/currency",
    "/NotificationRequestItem/eventCode",
    "/NotificationRequestItem/success",
];
