//! The plan of a storm: its genuine, late and forged events and the order of their requests, all derived
//! from the seed. Equal arguments give equal plans. Nothing here sends a request.

use hapax_core::sample::SampleId;
use hapax_core::{Arrival, Source, Timeliness, Timestamp, Verified};

use crate::StormError;
use crate::rng::Rng;
use crate::sender::{Sender, sign_as};

/// How far outside the window a stale request is signed: more than any clock error.
const STALE_BEYOND_SECONDS: i64 = 3_600;

/// The most late events of a run; more would show nothing new.
const STALE_MAX: u64 = 100;

/// The most forged requests of each kind.
const FORGED_MAX: u64 = 25;

/// The size and the kinds of a storm.
#[derive(Debug, Clone)]
pub struct StormSize {
    /// The event type; `None` for a common type of the sender.
    pub event_type: Option<String>,
    /// The number of distinct events.
    pub events: u64,
    /// How many times each event is sent, all copies at once.
    pub copies: u64,
    /// The number of concurrent requests.
    pub concurrency: u64,
    /// Also send events that were signed outside the window.
    pub stale: bool,
    /// Also send forged events.
    pub forged: bool,
    /// Send everything in one random order instead of event by event.
    pub shuffle: bool,
}

/// Everything that a storm sends.
pub struct StormPlan {
    /// Genuine events first, then late ones, then forged ones.
    pub events: Vec<Event>,
    /// In the order in which they start; the requests of one group start together.
    pub groups: Vec<Group>,
    /// Why late events cannot be checked with this sender.
    pub(crate) stale_unjudged: Option<String>,
    /// Why a kind of forgery cannot be checked with this sender.
    pub(crate) forged_unjudged: Option<String>,
    impostor: Option<Source>,
    stale_by_seconds: i64,
}

/// One event, genuine or not.
pub struct Event {
    /// The sender's id.
    pub event_id: String,
    /// Whether the event is genuine, late or forged.
    pub kind: RequestKind,
    unsigned: Arrival,
}

/// Whether a request is genuine, late or forged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// Signed now, with the right secret.
    Genuine,
    /// Correctly signed, but outside the window.
    Stale,
    /// Signed with a secret that the endpoint does not know.
    WrongSecret,
    /// One byte of the body was changed after signing.
    ChangedBody,
    /// There is no signature.
    Unsigned,
}

impl RequestKind {
    pub(crate) const FORGED: [Self; 3] = [Self::WrongSecret, Self::ChangedBody, Self::Unsigned];

    pub(crate) fn is_forged(self) -> bool {
        Self::FORGED.contains(&self)
    }

    /// A short description.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Genuine => "genuine",
            Self::Stale => "signed outside the window",
            Self::WrongSecret => "signed with a wrong secret",
            Self::ChangedBody => "one byte of the body changed after signing",
            Self::Unsigned => "no signature",
        }
    }
}

/// Copies of one event that start together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The index in [`StormPlan::events`].
    pub event: usize,
    /// How the event is sent: a genuine event may also be sent late.
    pub kind: RequestKind,
    /// The number of copies.
    pub copies: u64,
}

impl StormPlan {
    /// The plan of a storm of this shape.
    pub fn new(
        sender: &Sender,
        shape: &StormSize,
        seed: u64,
        now: Timestamp,
    ) -> Result<Self, StormError> {
        let mut rng = Rng::new(seed);
        let window = i64::try_from(sender.source.tolerance().as_secs()).unwrap_or(i64::MAX);
        let mut plan = Self {
            events: Vec::new(),
            groups: Vec::new(),
            stale_unjudged: None,
            forged_unjudged: None,
            impostor: sender.impostor(&rng.bytes()),
            stale_by_seconds: window.saturating_add(STALE_BEYOND_SECONDS),
        };
        for _ in 0..shape.events {
            plan.add(sender, shape, RequestKind::Genuine, &mut rng, now)?;
        }
        if shape.stale {
            plan.add_stale(sender, shape, &mut rng, now)?;
        }
        if shape.forged {
            plan.add_forged(sender, shape, &mut rng, now)?;
        }
        plan.order_requests(shape, &mut rng);
        Ok(plan)
    }

    /// The number of requests, without retries.
    pub fn requests(&self) -> u64 {
        self.groups.iter().map(|group| group.copies).sum()
    }

    /// The indexes of the genuine events.
    pub fn genuine(&self) -> impl Iterator<Item = usize> {
        let genuine = |place: &usize| self.events[*place].kind == RequestKind::Genuine;
        (0..self.events.len()).filter(genuine)
    }

    /// The request for an event of this kind at `now`.
    pub(crate) fn request(
        &self,
        sender: &Sender,
        event: &Event,
        kind: RequestKind,
        now: Timestamp,
    ) -> Result<Arrival, StormError> {
        let unsigned = &event.unsigned;
        match kind {
            RequestKind::Genuine => sign_as(&sender.source, unsigned, now),
            RequestKind::Stale => sign_as(&sender.source, unsigned, self.stale_time(now)),
            RequestKind::WrongSecret => match &self.impostor {
                Some(impostor) => sign_as(impostor, unsigned, now),
                None => Ok(unsigned.clone()),
            },
            RequestKind::ChangedBody => {
                let mut request = sign_as(&sender.source, unsigned, now)?;
                request.body = one_byte_changed(&request.body, &event.event_id);
                Ok(request)
            }
            RequestKind::Unsigned => Ok(unsigned.clone()),
        }
    }

    fn add_stale(
        &mut self,
        sender: &Sender,
        shape: &StormSize,
        rng: &mut Rng,
        now: Timestamp,
    ) -> Result<(), StormError> {
        if !sender.source.signs_time() {
            let title = sender.preset.title;
            self.stale_unjudged =
                Some(format!("{title} signs no timestamp, so no event can be late"));
            return Ok(());
        }
        for _ in 0..shape.events.min(STALE_MAX) {
            self.add(sender, shape, RequestKind::Stale, rng, now)?;
        }
        Ok(())
    }

    fn add_forged(
        &mut self,
        sender: &Sender,
        shape: &StormSize,
        rng: &mut Rng,
        now: Timestamp,
    ) -> Result<(), StormError> {
        for kind in RequestKind::FORGED {
            for _ in 0..shape.events.min(FORGED_MAX) {
                self.add(sender, shape, kind, rng, now)?;
                // If a sender does not sign the body, a changed body is not a forgery.
                if self.is_what_it_claims(sender, now)? {
                    continue;
                }
                self.events.pop();
                let title = sender.preset.title;
                self.forged_unjudged = Some(format!(
                    "not checked: the scheme of {title} cannot detect this forgery ({})",
                    kind.name()
                ));
                break;
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        sender: &Sender,
        shape: &StormSize,
        kind: RequestKind,
        rng: &mut Rng,
        now: Timestamp,
    ) -> Result<(), StormError> {
        // The same seed on the same day gives the same bytes: copies, not conflicts.
        let today =
            Timestamp::from_second(now.as_second().div_euclid(86_400) * 86_400).unwrap_or(now);
        let token = format!("storm{:016x}", rng.next_u64());
        let id = SampleId::made_up(token, today);
        let unsigned = sender.sample(shape.event_type.as_deref(), &id)?;
        let event_id = sender.sign(&unsigned, now)?.event_id;
        if event_id.is_empty() {
            return Err(StormError::arguments(
                format!("sample events of {} have no event id", sender.preset.title),
                "see `hapax providers NAME`",
            ));
        }
        self.events.push(Event { event_id, kind, unsigned });
        if kind == RequestKind::Stale && !self.is_what_it_claims(sender, now)? {
            return Err(StormError::arguments(
                format!("events of {} cannot be signed with an earlier time", sender.preset.title),
                "leave out --stale",
            ));
        }
        Ok(())
    }

    /// Whether `verify` judges the last event as its kind says.
    fn is_what_it_claims(&self, sender: &Sender, now: Timestamp) -> Result<bool, StormError> {
        let Some(event) = self.events.last() else { return Ok(false) };
        let request = self.request(sender, event, event.kind, now)?;
        let verified = hapax_core::verify(&sender.source, &request, now);
        Ok(match (event.kind, verified) {
            (RequestKind::Genuine, verified) => verified.is_ok(),
            (RequestKind::Stale, Ok(Verified::Events { receipts, .. })) => receipts
                .iter()
                .all(|receipt| matches!(receipt.timeliness(), Timeliness::Late { .. })),
            (RequestKind::Stale, Ok(Verified::Reply(_) | Verified::Empty) | Err(_)) => false,
            (
                RequestKind::WrongSecret | RequestKind::ChangedBody | RequestKind::Unsigned,
                verified,
            ) => verified.is_err(),
        })
    }

    /// Orders the requests by event, late and forged ones last, or at random with `--shuffle`.
    fn order_requests(&mut self, shape: &StormSize, rng: &mut Rng) {
        for (place, event) in self.events.iter().enumerate() {
            let kind = event.kind;
            let copies = match kind {
                RequestKind::Genuine => shape.copies,
                RequestKind::Stale
                | RequestKind::WrongSecret
                | RequestKind::ChangedBody
                | RequestKind::Unsigned => 1,
            };
            if shape.shuffle {
                self.groups.extend((0..copies).map(|_| Group { event: place, kind, copies: 1 }));
                continue;
            }
            let mut left = copies;
            while left > 0 {
                let together = left.min(shape.concurrency);
                self.groups.push(Group { event: place, kind, copies: together });
                left -= together;
            }
        }
        if shape.shuffle {
            rng.shuffle(&mut self.groups);
        }
    }

    fn stale_time(&self, now: Timestamp) -> Timestamp {
        Timestamp::from_second(now.as_second().saturating_sub(self.stale_by_seconds))
            .unwrap_or(Timestamp::UNIX_EPOCH)
    }
}

/// Changes one digit outside the event id, or else the last letter. The body stays well-formed, so that a
/// receiver that does not check the signature would accept it.
fn one_byte_changed(body: &[u8], event_id: &str) -> bytes::Bytes {
    let mut changed = body.to_vec();
    let id = event_id.as_bytes();
    let in_id = |place: usize| {
        !id.is_empty()
            && (place.saturating_sub(id.len() - 1)..=place)
                .any(|start| body[start..].starts_with(id))
    };
    let digit = (0..body.len()).rev().find(|place| body[*place].is_ascii_digit() && !in_id(*place));
    let letter = || (0..body.len()).rev().find(|place| body[*place].is_ascii_alphabetic());
    match digit.or_else(letter) {
        Some(place) => changed[place] ^= 1,
        None => changed.push(b' '),
    }
    changed.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, event_id: &str, expected: &str) {
        let changed = one_byte_changed(body.as_bytes(), event_id);
        assert_eq!(std::str::from_utf8(&changed).unwrap(), expected);
    }

    #[test]
    fn one_byte_is_changed_outside_the_event_id() {
        // If a receiver accepts the forgery, its effect is found by the unchanged id.
        check(r#"{"n":10,"id":"e12"}"#, "e12", r#"{"n":11,"id":"e12"}"#);
        check(r#"{"id":"e12","n":9}"#, "e12", r#"{"id":"e12","n":8}"#);
        check(r#"{"id":"e12"}"#, "e12", r#"{"id":"d12"}"#);
        check("", "e", " ");
    }
}
