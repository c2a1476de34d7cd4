//! The laws of a storm and their verdicts: a pure function of the requests, the answers and the
//! effects.

use std::collections::{BTreeMap, BTreeSet};

use crate::plan::{RequestKind, StormPlan};
use crate::probe::EffectCounts;
use crate::requests::RequestOutcome;
use crate::sender::{NoAnswer, RequestAnswer};

/// The most examples of a broken law.
const EXAMPLES_MAX: usize = 5;

/// One law, judged.
#[derive(Debug)]
pub struct Law {
    /// The name in JSON and JUnit.
    pub name: &'static str,
    /// The title in the table.
    pub title: &'static str,
    /// Whether the law held.
    pub verdict: LawVerdict,
    /// The number of breaches.
    pub breaches: u64,
    /// The first few breaches.
    pub examples: Vec<Example>,
    /// A note on the verdict.
    pub note: Option<String>,
}

/// The verdict on a law.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LawVerdict {
    /// No breach was seen.
    Held,
    /// At least one breach was seen.
    Broken,
    /// The law could not be checked; its note says why.
    NotJudged,
}

/// One breach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// The sender's id of the event; `-` for a breach of no single event.
    pub event_id: String,
    /// The outcome that the law expects.
    pub expected: String,
    /// The outcome that was seen instead.
    pub seen: String,
}

/// Everything that is known at the end of a storm.
pub(crate) struct Evidence<'a> {
    pub(crate) plan: &'a StormPlan,
    pub(crate) outcomes: &'a [RequestOutcome],
    /// The outcomes of the copies that were sent at the end.
    pub(crate) replayed: &'a [RequestOutcome],
    pub(crate) effects: Effects,
}

/// The readings of the probe.
pub(crate) enum Effects {
    /// There is no probe.
    NoProbe,
    /// The probe worked before the storm and failed afterwards.
    Lost(String),
    Read {
        before: EffectCounts,
        /// The effects after the storm, once they have settled.
        after: EffectCounts,
        /// The effects after the replay, once they have settled.
        last: EffectCounts,
    },
}

impl Effects {
    /// Three readings that can be compared; otherwise the probe counts as failed.
    pub(crate) fn read(before: EffectCounts, after: EffectCounts, last: EffectCounts) -> Self {
        let alike = match (&before, &after, &last) {
            (_, EffectCounts::Count(_), EffectCounts::Count(_)) => true,
            (
                EffectCounts::Each(_) | EffectCounts::Count(0),
                EffectCounts::Each(_),
                EffectCounts::Each(_),
            ) => true,
            (
                EffectCounts::Each(_) | EffectCounts::Count(_),
                EffectCounts::Each(_) | EffectCounts::Count(_),
                _,
            ) => false,
        };
        match alike {
            true => Self::Read { before, after, last },
            false => Self::Lost(
                "cannot compare the effects: the probe returned a number in one reading and a list of ids in another"
                    .to_owned(),
            ),
        }
    }
}

/// Checks every law that applies.
pub(crate) fn judge(evidence: &Evidence<'_>, stale: bool, forged: bool) -> Vec<Law> {
    let mut laws = vec![answered(evidence), one_outcome(evidence)];
    if stale {
        laws.push(stale_refused(evidence));
    }
    if forged {
        laws.push(forged_refused(evidence));
    }
    laws.push(one_effect(evidence));
    laws.push(replayed(evidence));
    laws
}

/// Whether effects of genuine events are still missing.
pub(crate) fn is_missing(plan: &StormPlan, before: &EffectCounts, now: &EffectCounts) -> bool {
    match now {
        EffectCounts::Count(count) => {
            count.saturating_sub(before.total()) < plan.genuine().count() as u64
        }
        EffectCounts::Each(effects) => {
            plan.genuine().any(|place| !effects.contains_key(&plan.events[place].event_id))
        }
    }
}

/// The breaches of one law, while it is checked.
#[derive(Default)]
struct Breaches {
    count: u64,
    examples: Vec<Example>,
}

impl Breaches {
    fn add(&mut self, event_id: &str, expected: impl Into<String>, seen: impl Into<String>) {
        self.count += 1;
        // Copies of one event with the same outcome are one example.
        let known = self.examples.iter().any(|example| example.event_id == event_id);
        if !known && self.examples.len() < EXAMPLES_MAX {
            let (expected, seen) = (expected.into(), seen.into());
            self.examples.push(Example { event_id: event_id.to_owned(), expected, seen });
        }
    }

    fn law(self, name: &'static str, title: &'static str, note: Option<String>) -> Law {
        let verdict = if self.count == 0 { LawVerdict::Held } else { LawVerdict::Broken };
        Law { name, title, verdict, breaches: self.count, examples: self.examples, note }
    }
}

fn not_judged(name: &'static str, title: &'static str, why: impl Into<String>) -> Law {
    let (verdict, note) = (LawVerdict::NotJudged, Some(why.into()));
    Law { name, title, verdict, breaches: 0, examples: Vec::new(), note }
}

fn of_kind<'a>(
    evidence: &'a Evidence<'_>,
    is: impl Fn(RequestKind) -> bool + 'a,
) -> impl Iterator<Item = &'a RequestOutcome> {
    evidence.outcomes.iter().filter(move |outcome| is(outcome.kind))
}

fn is_good(status: u16) -> bool {
    (200..300).contains(&status)
}

fn seen(answer: &Result<RequestAnswer, NoAnswer>) -> String {
    match answer {
        Ok(RequestAnswer { status, decision: Some(decision), .. }) => {
            format!("{status} {decision}")
        }
        Ok(RequestAnswer { status, decision: None, .. }) => status.to_string(),
        Err(NoAnswer::CannotConnect(why) | NoAnswer::Lost(why)) => format!("no answer: {why}"),
    }
}

fn must_be_good(plan: &StormPlan, outcome: &RequestOutcome, breaches: &mut Breaches) {
    match &outcome.answer {
        Ok(answer) if is_good(answer.status) => {}
        Ok(_) | Err(_) => {
            breaches.add(&plan.events[outcome.event].event_id, "2xx", seen(&outcome.answer));
        }
    }
}

fn answered(evidence: &Evidence<'_>) -> Law {
    let mut breaches = Breaches::default();
    for outcome in of_kind(evidence, |kind| kind == RequestKind::Genuine) {
        must_be_good(evidence.plan, outcome, &mut breaches);
    }
    let turned_away = |outcome: &RequestOutcome| {
        outcome.answer.as_ref().is_ok_and(|said| matches!(said.status, 401 | 403))
    };
    let all = of_kind(evidence, |kind| kind == RequestKind::Genuine).all(turned_away);
    let note = all.then(|| {
        "every request was rejected: check that --secret is the secret of this endpoint".to_owned()
    });
    breaches.law("answered", "every genuine copy is answered 2xx", note)
}

/// Uses only answers with a decision: an `id` alone may be the id of the request.
fn one_outcome(evidence: &Evidence<'_>) -> Law {
    let (name, title) = ("one_outcome", "all copies of an event get one outcome");
    let mut outcomes: BTreeMap<usize, (BTreeSet<&str>, u64)> = BTreeMap::new();
    for outcome in of_kind(evidence, |kind| kind == RequestKind::Genuine) {
        let Ok(RequestAnswer { decision: Some(decision), id, status, .. }) = &outcome.answer else {
            continue;
        };
        if is_good(*status) {
            let (ids, firsts) = outcomes.entry(outcome.event).or_default();
            ids.extend(id.as_deref());
            *firsts += u64::from(decision == "accepted");
        }
    }
    if outcomes.is_empty() {
        return not_judged(name, title, "the answers contain no decision");
    }
    let mut breaches = Breaches::default();
    for (place, (ids, firsts)) in outcomes {
        let event_id = &evidence.plan.events[place].event_id;
        if ids.len() > 1 {
            let ids: Vec<&str> = ids.into_iter().collect();
            breaches.add(event_id, "one id", ids.join(", "));
        } else if firsts > 1 {
            breaches.add(event_id, "accepted once", format!("accepted {firsts} times"));
        }
    }
    breaches.law(name, title, None)
}

fn stale_refused(evidence: &Evidence<'_>) -> Law {
    let (name, title) = ("stale_refused", "events signed outside the window are rejected");
    if let Some(why) = &evidence.plan.stale_unjudged {
        return not_judged(name, title, why);
    }
    let mut breaches = Breaches::default();
    for outcome in of_kind(evidence, |kind| kind == RequestKind::Stale) {
        let refused = outcome.answer.as_ref().is_ok_and(|answer| {
            let kept_for_review =
                is_good(answer.status) && answer.decision.as_deref() == Some("review");
            (400..500).contains(&answer.status) || kept_for_review
        });
        if !refused {
            let event_id = &evidence.plan.events[outcome.event].event_id;
            breaches.add(event_id, "4xx, or kept for review", seen(&outcome.answer));
        }
    }
    // A late copy of a known event may also be answered as a duplicate. The law `replay` checks that it has
    // no effect.
    for outcome in evidence.replayed.iter().filter(|outcome| outcome.kind == RequestKind::Stale) {
        let settled = outcome
            .answer
            .as_ref()
            .is_ok_and(|said| is_good(said.status) || (400..500).contains(&said.status));
        if !settled {
            let event_id = &evidence.plan.events[outcome.event].event_id;
            breaches.add(event_id, "4xx, or 2xx as a duplicate", seen(&outcome.answer));
        }
    }
    breaches.law(name, title, None)
}

fn forged_refused(evidence: &Evidence<'_>) -> Law {
    let (name, title) = ("forged_refused", "forged events are rejected");
    let mut breaches = Breaches::default();
    let mut any = false;
    for outcome in of_kind(evidence, RequestKind::is_forged) {
        any = true;
        if !outcome.answer.as_ref().is_ok_and(|answer| (400..500).contains(&answer.status)) {
            let event = &evidence.plan.events[outcome.event];
            let expected = format!("4xx ({})", event.kind.name());
            breaches.add(&event.event_id, expected, seen(&outcome.answer));
        }
    }
    let note = evidence.plan.forged_unjudged.clone();
    match (any, note) {
        (false, Some(why)) => not_judged(name, title, why),
        (_, note) => breaches.law(name, title, note),
    }
}

fn one_effect(evidence: &Evidence<'_>) -> Law {
    let (name, title) = ("one_effect", "exactly one effect for each event, and no other");
    let (before, after, last) = match &evidence.effects {
        Effects::NoProbe => {
            return not_judged(
                name,
                title,
                "effects were not judged: pass --effects-cmd, --effects-url or --effects-sql",
            );
        }
        Effects::Lost(why) => return not_judged(name, title, why),
        Effects::Read { before, after, last } => (before, after, last),
    };
    let mut breaches = Breaches::default();
    let mut note = None;
    match (before, after, last) {
        (before, EffectCounts::Count(after), EffectCounts::Count(_)) => {
            let expected = evidence.plan.genuine().count() as u64;
            let grown = i128::from(*after) - i128::from(before.total());
            if grown != i128::from(expected) {
                breaches.add("-", format!("{expected} effects"), grown.to_string());
                breaches.count = grown.abs_diff(i128::from(expected)).try_into().unwrap_or(1);
                note = Some(
                    "use a probe that lists event ids to see which events are wrong".to_owned(),
                );
            }
        }
        (before, EffectCounts::Each(after), EffectCounts::Each(last)) => {
            let nothing = BTreeMap::new();
            let before = if let EffectCounts::Each(before) = before { before } else { &nothing };
            each_once(evidence, before, after, last, &mut breaches);
        }
        (_, EffectCounts::Each(_), EffectCounts::Count(_))
        | (_, EffectCounts::Count(_), EffectCounts::Each(_)) => {
            unreachable!("readings are made comparable in Effects::read")
        }
    }
    if breaches.count > 0 && were_known(evidence) {
        note = Some(
            "the endpoint knows the events of this seed: pass another --seed, or empty its database"
                .to_owned(),
        );
    }
    breaches.law(name, title, note)
}

/// For events that were sent again, the reading before the replay counts; a later effect breaks
/// `replay`.
fn each_once(
    evidence: &Evidence<'_>,
    before: &BTreeMap<String, u64>,
    after: &BTreeMap<String, u64>,
    last: &BTreeMap<String, u64>,
    breaches: &mut Breaches,
) {
    let plan = evidence.plan;
    let replayed: BTreeSet<usize> = evidence.replayed.iter().map(|outcome| outcome.event).collect();
    let count = |reading: &BTreeMap<String, u64>, id: &str| reading.get(id).copied().unwrap_or(0);
    let mut known = BTreeSet::new();
    for (place, event) in plan.events.iter().enumerate() {
        let id = event.event_id.as_str();
        known.insert(id);
        let effects = count(if replayed.contains(&place) { after } else { last }, id);
        match event.kind {
            RequestKind::Genuine if effects == 1 => {}
            RequestKind::Genuine => breaches.add(id, "1 effect", effects.to_string()),
            RequestKind::Stale
            | RequestKind::WrongSecret
            | RequestKind::ChangedBody
            | RequestKind::Unsigned => {
                if effects > 0 {
                    let expected = format!("no effect ({})", event.kind.name());
                    breaches.add(id, expected, effects.to_string());
                }
            }
        }
    }
    for (id, effects) in last {
        let grown = effects.saturating_sub(count(before, id));
        if grown > 0 && !known.contains(id.as_str()) {
            breaches.add(id, "no effect (not an event of this storm)", grown.to_string());
        }
    }
}

/// Whether the endpoint answered every genuine event as a duplicate.
fn were_known(evidence: &Evidence<'_>) -> bool {
    let mut decisions = of_kind(evidence, |kind| kind == RequestKind::Genuine)
        .filter_map(|outcome| outcome.answer.as_ref().ok()?.decision.as_deref())
        .peekable();
    decisions.peek().is_some() && decisions.all(|decision| decision == "duplicate")
}

fn replayed(evidence: &Evidence<'_>) -> Law {
    let (name, title) = ("replay", "a later copy is answered 2xx and has no effect");
    let mut breaches = Breaches::default();
    for outcome in evidence.replayed {
        if outcome.kind == RequestKind::Genuine {
            must_be_good(evidence.plan, outcome, &mut breaches);
        }
        if let Ok(RequestAnswer { decision: Some(decision), status, .. }) = &outcome.answer
            && is_good(*status)
            && decision == "accepted"
        {
            let event_id = &evidence.plan.events[outcome.event].event_id;
            breaches.add(event_id, "a duplicate", seen(&outcome.answer));
        }
    }
    let mut note = None;
    match &evidence.effects {
        Effects::NoProbe | Effects::Lost(_) => {
            note = Some("only the answers were judged".to_owned());
        }
        Effects::Read {
            after: EffectCounts::Each(after), last: EffectCounts::Each(last), ..
        } => {
            let replayed: BTreeSet<usize> =
                evidence.replayed.iter().map(|outcome| outcome.event).collect();
            for place in replayed {
                let id = &evidence.plan.events[place].event_id;
                let count = |reading: &BTreeMap<String, u64>| reading.get(id).copied().unwrap_or(0);
                let (before, is) = (count(after), count(last));
                // An effect that was missing may have appeared by itself.
                if is > before.max(1) {
                    breaches.add(id, format!("still {} effect", before.max(1)), is.to_string());
                }
            }
        }
        Effects::Read { before, after, last } => {
            let expected = before.total() + evidence.plan.genuine().count() as u64;
            let most = after.total().max(expected);
            if last.total() > most {
                let more = last.total() - most;
                breaches.add("-", "no further effect", format!("{more} more"));
            }
        }
    }
    breaches.law(name, title, note)
}
