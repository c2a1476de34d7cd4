//! The report of a storm: laws and figures as text, as JSON and as JUnit XML.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::judge::{Effects, Evidence, Example, Law, LawVerdict};
use crate::plan::RequestKind;
use crate::requests::RequestOutcome;

/// The result of a storm.
pub struct Report {
    /// Every law that applied.
    pub laws: Vec<Law>,
    /// The counts and measurements.
    pub figures: StormCounts,
    /// Whether the probe worked before the storm and failed afterwards, so that effects were not judged.
    pub probe_failed: bool,
    /// How long the storm took, without the readings of the probe.
    pub took: Duration,
}

impl Report {
    /// Broken if any law is broken; not judged only if no law was judged.
    pub fn verdict(&self) -> LawVerdict {
        overall(&self.laws)
    }

    /// One object per law, then the summary.
    pub fn json(&self) -> Vec<Value> {
        let mut objects: Vec<Value> = self.laws.iter().map(Law::json).collect();
        objects.push(self.figures.json(&self.laws));
        objects
    }

    /// JUnit XML with one testcase per law.
    pub fn junit(&self) -> String {
        junit(&self.laws, self.took)
    }
}

impl Law {
    fn json(&self) -> Value {
        let examples: Vec<Value> = self
            .examples
            .iter()
            .map(|example| {
                json!({
                    "event_id": example.event_id,
                    "expected": example.expected,
                    "seen": example.seen,
                })
            })
            .collect();
        json!({
            "law": self.name,
            "title": self.title,
            "verdict": self.verdict.as_str(),
            "breaches": self.breaches,
            "examples": examples,
            "note": self.note,
        })
    }

    /// The examples of breaches and the note, line by line. The text may come from the endpoint.
    pub fn details(&self) -> Vec<String> {
        let example = |example: &Example| {
            let Example { event_id, expected, seen } = example;
            format!("{event_id}: expected {expected}, seen {seen}")
        };
        self.examples.iter().map(example).chain(self.note.clone()).collect()
    }
}

impl LawVerdict {
    /// The verdict as JSON names it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Broken => "broken",
            Self::NotJudged => "not_judged",
        }
    }
}

/// The counts and measurements of a storm.
pub struct StormCounts {
    seed: u64,
    events: u64,
    requests: u64,
    retries: u64,
    no_answer: u64,
    by_status: BTreeMap<u16, u64>,
    /// Over the genuine copies that were answered 2xx.
    ack_p50: Option<Duration>,
    ack_p99: Option<Duration>,
    /// The effects before the storm and at its end.
    effects: Option<(u64, u64)>,
    took: Duration,
}

impl StormCounts {
    pub(crate) fn new(seed: u64, evidence: &Evidence<'_>, took: Duration) -> Self {
        let all = || evidence.outcomes.iter().chain(evidence.replayed);
        let mut by_status = BTreeMap::new();
        for answer in all().flat_map(|outcome| &outcome.tries) {
            *by_status.entry(answer.status).or_default() += 1;
        }
        let genuine = |outcome: &&RequestOutcome| outcome.kind == RequestKind::Genuine;
        let mut acks: Vec<Duration> = all()
            .filter(genuine)
            .flat_map(|outcome| &outcome.tries)
            .filter(|answer| (200..300).contains(&answer.status))
            .map(|answer| answer.took)
            .collect();
        acks.sort_unstable();
        let again = |outcome: &RequestOutcome| {
            let further = outcome.tries.len() + usize::from(outcome.answer.is_err());
            further.saturating_sub(1) as u64
        };
        Self {
            seed,
            events: evidence.plan.genuine().count() as u64,
            requests: all().count() as u64,
            retries: all().map(again).sum(),
            no_answer: all().filter(|outcome| outcome.answer.is_err()).count() as u64,
            by_status,
            ack_p50: rank(&acks, 50),
            ack_p99: rank(&acks, 99),
            effects: match &evidence.effects {
                Effects::NoProbe | Effects::Lost(_) => None,
                Effects::Read { before, last, .. } => Some((before.total(), last.total())),
            },
            took,
        }
    }

    fn json(&self, laws: &[Law]) -> Value {
        let ms = |took: Option<Duration>| took.map(|took| took.as_secs_f64() * 1_000.0);
        let by_status: BTreeMap<String, u64> =
            self.by_status.iter().map(|(status, count)| (status.to_string(), *count)).collect();
        json!({
            "summary": overall(laws).as_str(),
            "seed": self.seed,
            "events": self.events,
            "requests": self.requests,
            "retries": self.retries,
            "no_answer": self.no_answer,
            "answers": by_status,
            "ack_ms": { "p50": ms(self.ack_p50), "p99": ms(self.ack_p99) },
            "effects": self.effects.map(|(before, after)| json!({ "before": before, "after": after })),
            "seconds": self.took.as_secs_f64(),
        })
    }

    /// The figures, line by line.
    pub fn lines(&self) -> Vec<String> {
        let mut answers: Vec<String> =
            self.by_status.iter().map(|(status, count)| format!("{count} × {status}")).collect();
        if self.no_answer > 0 {
            answers.push(format!("{} × no answer", self.no_answer));
        }
        let ms = |took: Option<Duration>| {
            took.map_or("-".to_owned(), |took| format!("{:.1} ms", took.as_secs_f64() * 1_000.0))
        };
        let mut lines = vec![
            format!(
                "{} events, {} requests, {} retries, {:.1} s, seed {}",
                self.events,
                self.requests,
                self.retries,
                self.took.as_secs_f64(),
                self.seed
            ),
            format!("answers: {}", answers.join(", ")),
            format!("acks: p50 {}, p99 {}", ms(self.ack_p50), ms(self.ack_p99)),
        ];
        if let Some((before, after)) = self.effects {
            lines.push(format!("effects: {before} before, {after} after"));
        }
        lines
    }
}

fn junit(laws: &[Law], took: Duration) -> String {
    let count = |verdict| laws.iter().filter(|law| law.verdict == verdict).count();
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n  <testsuite name=\"hapax storm\" \
         tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"{:.3}\">\n",
        laws.len(),
        count(LawVerdict::Broken),
        count(LawVerdict::NotJudged),
        took.as_secs_f64(),
    );
    for law in laws {
        let text = escaped(&law.details().join("\n"));
        let inside = match law.verdict {
            LawVerdict::Held => String::new(),
            LawVerdict::Broken => {
                format!("<failure message=\"broken {} times\">{text}</failure>", law.breaches)
            }
            LawVerdict::NotJudged => format!("<skipped message=\"{text}\"/>"),
        };
        let _ = writeln!(
            xml,
            "    <testcase classname=\"storm.{}\" name=\"{}\">{inside}</testcase>",
            law.name,
            escaped(law.title)
        );
    }
    xml.push_str("  </testsuite>\n</testsuites>\n");
    xml
}

/// JUnit XML for a storm that failed to run, so that a pipeline does not take it for a success.
pub fn junit_of_failure(message: &str) -> String {
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n  <testsuite name=\"hapax storm\" \
         tests=\"1\" failures=\"0\" errors=\"1\" skipped=\"0\">\n    <testcase classname=\"storm\" \
         name=\"the storm could be sent and its effects read\"><error message=\"{}\"/></testcase>\n  \
         </testsuite>\n</testsuites>\n",
        escaped(message)
    )
}

fn overall(laws: &[Law]) -> LawVerdict {
    let any = |verdict| laws.iter().any(|law| law.verdict == verdict);
    match (any(LawVerdict::Broken), any(LawVerdict::Held)) {
        (true, _) => LawVerdict::Broken,
        (false, true) => LawVerdict::Held,
        (false, false) => LawVerdict::NotJudged,
    }
}

/// The nearest-rank percentile.
fn rank(sorted: &[Duration], percent: usize) -> Option<Duration> {
    let place = (sorted.len() * percent).div_ceil(100);
    sorted.get(place.saturating_sub(1)).copied()
}

/// Escapes text for XML. Most control characters cannot be written in XML, so they are shown as Rust
/// escapes.
fn escaped(text: &str) -> String {
    let shown = |c: char| -> Vec<char> {
        match c.is_control() && !matches!(c, '\n' | '\t') {
            true => c.escape_default().collect(),
            false => vec![c],
        }
    };
    text.chars()
        .flat_map(shown)
        .filter(|c| !matches!(c, '\u{fffe}' | '\u{ffff}'))
        .map(|c| match c {
            '<' => "&lt;".to_owned(),
            '>' => "&gt;".to_owned(),
            '&' => "&amp;".to_owned(),
            '"' => "&quot;".to_owned(),
            other => other.to_string(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_an_endpoint_cannot_break_the_xml() {
        assert_eq!(
            escaped("a<b>&\"c\"\u{1b}\u{0}\nd"),
            "a&lt;b&gt;&amp;&quot;c&quot;\\u{1b}\\u{0}\nd"
        );
    }

    #[test]
    fn a_percentile_is_one_of_the_measured_values() {
        let ms = |ms: &[u64]| ms.iter().map(|ms| Duration::from_millis(*ms)).collect::<Vec<_>>();
        assert_eq!(rank(&ms(&[]), 50), None);
        assert_eq!(rank(&ms(&[7]), 99), Some(Duration::from_millis(7)));
        assert_eq!(rank(&ms(&[1, 2, 3, 4]), 50), Some(Duration::from_millis(2)));
        assert_eq!(rank(&ms(&[1, 2, 3, 4]), 99), Some(Duration::from_millis(4)));
    }
}
