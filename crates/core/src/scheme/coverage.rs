//! Which parts of a request a scheme signs. This alone decides whether an id, a type or a tenant can be
//! trusted, and whether an event needs a guard. Neither a preset nor the config can change this.

use super::recipe::{ComposedSignature, Recipe, TimeAt};
use crate::envelope::Origin;

/// The parts of a request that a scheme signs under one set of header names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    body: BodyCovered,
    url: bool,
    time: bool,
    /// The signed headers. The scheme refuses a request without them.
    headers: Vec<Box<str>>,
    /// Headers that are absent whenever this set of names applies.
    missing: Vec<Box<str>>,
    /// Whether the text after each signed header in the content fixes where the header ends.
    cuts_are_fixed: bool,
    /// Whether the signed content can be split into its parts in only one way.
    has_one_reading: bool,
}

/// How much of the body is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyCovered {
    /// Its bytes.
    Bytes,
    /// The decoded fields of a form, in any order and spelling.
    Fields,
    /// These fields of each item, by their JSON pointers.
    Pointers(&'static [&'static str]),
    /// Nothing that distinguishes one body from another.
    Nothing,
}

/// Whether a value is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Covered {
    /// The value is signed.
    Yes,
    /// The value is signed, and a request without it is refused.
    Always,
    /// The value is absent.
    Missing,
    /// The value is not signed.
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

    /// The coverage of each set of header names of `recipe`, and of each choice.
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
                    // A later set applies only if no header of an earlier set is present.
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
            // A CRC-32 does not authenticate the body.
            Recipe::PayPal => vec![Self {
                time: true,
                headers: vec!["paypal-transmission-id".into(), "paypal-transmission-time".into()],
                ..Self::new(BodyCovered::Nothing)
            }],
            Recipe::Plaid => vec![Self { time: true, ..Self::new(BodyCovered::Bytes) }],
            Recipe::Token { .. } | Recipe::Basic => vec![Self::new(BodyCovered::Nothing)],
        }
    }

    /// The coverage of composed content.
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

    /// The coverage of content that the config describes: bytes may move from a signed header into
    /// the adjacent text, so that one signature is valid for several ids.
    pub(super) fn with_loose_cuts(self, content: &str) -> Self {
        Self { cuts_are_fixed: false, has_one_reading: has_one_reading(content), ..self }
    }

    /// Whether anything is signed.
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

    /// Whether a value from this origin is signed.
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

    /// Whether one signature is valid for only one value from this origin.
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

    /// Whether a value from this origin is signed and none of its bytes can come from a neighbouring part.
    /// Values inside JSON fulfil this: bytes from outside would break the JSON.
    pub fn is_certain(&self, origin: Origin<'_>) -> bool {
        let is_signed = matches!(self.covers(origin), Covered::Yes | Covered::Always);
        let is_apart = match origin {
            Origin::Pointer(_) => true,
            // Twilio and Plivo sign fields without separators; shifted fields are refused elsewhere.
            Origin::Field => self.body == BodyCovered::Fields,
            Origin::Header(_) | Origin::Query | Origin::Body | Origin::Signed => false,
        };
        is_signed && (self.has_one_reading || is_apart)
    }
}

/// Whether content that the config describes can be split in only one way. A timestamp that gains or
/// loses bytes leaves the window. So one header before it, separated on both sides, has a fixed end too.
/// A URL, or a header at another position, has no fixed end.
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

/// The fields of an item that Adyen signs.
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

#[cfg(test)]
mod tests {
    use super::has_one_reading;

    #[test]
    fn composed_content_has_one_reading_only_where_nothing_can_move_across_a_cut() {
        // If one signature fits two readings, a captured request can get a second id.
        let check = |content: &str, one: bool| {
            assert_eq!(has_one_reading(content), one, "{content}");
        };
        check("{body}", true);
        check("{timestamp}{body}", true);
        check("{header:x-id}.{timestamp}.{body}", true);
        // No separator on one of the sides, or something behind the body.
        check("{header:x-id}{timestamp}.{body}", false);
        check("{header:x-id}.{timestamp}{body}", false);
        check("{header:x-id}.{timestamp}.{body}.", false);
        check("{header:x-id}.{timestamp}.{body}.{timestamp}", false);
        // A header at another position, several headers, or a header without the parts after it.
        check("{timestamp}.{header:x-id}.{body}", false);
        check("{body}.{header:x-id}", false);
        check("{header:x-id}.{header:x-kind}.{timestamp}.{body}", false);
        check("{header:x-id}.{body}", false);
        check("{header:x-id}.{timestamp}.", false);
        check("{timestamp}.{url}.{body}", false);
    }
}
