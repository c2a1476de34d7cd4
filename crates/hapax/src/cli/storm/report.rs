//! The report of a storm: laws and figures as a table, as JSON and as JUnit XML.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::output::{self, Failure};
use super::judge::{Effects, Evidence, Law, Verdict};
use super::plan::RequestKind;
use super::requests::RequestOutcome;

/// The counts and measurements of a storm.
pub(super) struct Figures {
    seed: u64,
    events: u64,
    requests: u64,
    retries: u64,
    no_answer: u64,
    by_status: BTreeMap<u16, u64>,
    /// Over the genuine copies that were answered 2xx.
    ack_p50: Option<Duration>,
    ack_p99: Option<Duration>,
    /// Before and after.
    effects: Option<(u64, u64)>,
    took: Duration,
}

impl Figures {
    pub(super) fn new(seed: u64, evidence: &Evidence<'_>, took: Duration) -> Self {
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
            "summary": word(overall(laws)),
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

    fn lines(&self) -> Vec<String> {
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

/// Prints one object per law, then the summary.
pub(super) fn print_json(laws: &[Law], figures: &Figures) -> Result<(), Failure> {
    for law in laws {
        let examples: Vec<Value> = law
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
        output::json(&json!({
            "law": law.name,
            "title": law.title,
            "verdict": word(law.verdict),
            "breaches": law.breaches,
            "examples": examples,
            "note": law.note,
        }))?;
    }
    output::json(&figures.json(laws))?;
    Ok(())
}

/// Prints the table, the examples of each broken law, and the figures.
pub(super) fn print_table(laws: &[Law], figures: &Figures) -> Result<(), Failure> {
    let width = laws.iter().map(|law| law.title.len()).max().unwrap_or(0);
    for law in laws {
        let colour = match law.verdict {
            Verdict::Held => "\u{1b}[32m",
            Verdict::Broken => "\u{1b}[1;31m",
            Verdict::NotJudged => "\u{1b}[33m",
        };
        let verdict = word(law.verdict).replace('_', " ");
        let times = match law.breaches {
            0 => String::new(),
            breaches => format!(" ×{breaches}"),
        };
        output::data(&format!("{:<width$}  {colour}{verdict}\u{1b}[0m{times}", law.title))?;
        for line in details(law) {
            output::data(&format!("    {line}"))?;
        }
    }
    output::data("")?;
    for line in figures.lines() {
        output::data(&line)?;
    }
    Ok(())
}

/// JUnit XML with one testcase per law.
pub(super) fn junit(laws: &[Law], took: Duration) -> String {
    let count = |verdict| laws.iter().filter(|law| law.verdict == verdict).count();
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n  <testsuite name=\"hapax storm\" \
         tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"{:.3}\">\n",
        laws.len(),
        count(Verdict::Broken),
        count(Verdict::NotJudged),
        took.as_secs_f64(),
    );
    for law in laws {
        let text = escaped(&details(law).join("\n"));
        let inside = match law.verdict {
            Verdict::Held => String::new(),
            Verdict::Broken => {
                format!("<failure message=\"broken {} times\">{text}</failure>", law.breaches)
            }
            Verdict::NotJudged => format!("<skipped message=\"{text}\"/>"),
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
pub(super) fn junit_of_failure(message: &str) -> String {
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n  <testsuite name=\"hapax storm\" \
         tests=\"1\" failures=\"0\" errors=\"1\" skipped=\"0\">\n    <testcase classname=\"storm\" \
         name=\"the storm could be sent and its effects read\"><error message=\"{}\"/></testcase>\n  \
         </testsuite>\n</testsuites>\n",
        escaped(message)
    )
}

/// Broken if one law is; not judged only if all are.
pub(super) fn overall(laws: &[Law]) -> Verdict {
    let any = |verdict| laws.iter().any(|law| law.verdict == verdict);
    match (any(Verdict::Broken), any(Verdict::Held)) {
        (true, _) => Verdict::Broken,
        (false, true) => Verdict::Held,
        (false, false) => Verdict::NotJudged,
    }
}

fn details(law: &Law) -> Vec<String> {
    let mut lines: Vec<String> = law
        .examples
        .iter()
        .map(|example| {
            let line = format!(
                "{}: expected {}, seen {}",
                example.event_id, example.expected, example.seen
            );
            output::shown(&line)
        })
        .collect();
    lines.extend(law.note.as_deref().map(output::shown));
    lines
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Held => "held",
        Verdict::Broken => "broken",
        Verdict::NotJudged => "not_judged",
    }
}

/// The nearest-rank percentile.
fn rank(sorted: &[Duration], percent: usize) -> Option<Duration> {
    let place = (sorted.len() * percent).div_ceil(100);
    sorted.get(place.saturating_sub(1)).copied()
}

/// Escapes text for XML. Most control characters cannot be written in XML, so they are removed.
fn escaped(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control() || matches!(c, '\n' | '\t'))
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
        assert_eq!(escaped("a<b>&\"c\"\u{1b}\u{0}\nd"), "a&lt;b&gt;&amp;&quot;c&quot;\nd");
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
