//! The figures of each source over time: its arrivals, the outcomes of its jobs, the durations of both, and
//! its backlog.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use hapax_core::store::{TrafficAsk, traffic_of_all};
use hapax_core::{SourceName, Timestamp};

use super::events::{ago, instant};
use super::extract::QueryParams;
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{History, HistoryPoint, HistoryQuery, Span};

/// The span if the request names none.
const SPAN_DEFAULT: Duration = Duration::from_secs(86_400);

/// The most steps of one answer.
const STEPS_MAX: u64 = 1_500;

/// The number of steps in an answer if the request names none.
const STEPS_DEFAULT: u64 = 60;

/// `GET /api/v1/history`.
pub(super) async fn history<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<HistoryQuery>,
) -> Result<Json<History>, Problem> {
    let now = (admin.now)();
    let from = query.from.map_or_else(|| ago(now, Span(SPAN_DEFAULT)), |from| instant(now, from));
    let to = query.to.map_or(now, |to| instant(now, to));
    let step = step(from, to, query.step)?;
    let ask = TrafficAsk {
        source: query.source.map(SourceName::new),
        from,
        to,
        step: Duration::from_secs(step),
        tallies: true,
    };
    let points = traffic_of_all(admin.watch.traffic().read(&*admin.store, ask).await?);
    Ok(Json(History {
        step_seconds: step,
        items: points.iter().map(|(at, figures)| HistoryPoint::of(*at, figures)).collect(),
        next: None,
    }))
}

/// The length of a step in seconds: whole minutes, as counts are kept.
fn step(from: Timestamp, to: Timestamp, asked: Option<Span>) -> Result<u64, Problem> {
    let span = to.duration_since(from);
    if !span.is_positive() {
        return Err(Problem::bad_request("to must be later than from"));
    }
    let span = span.as_secs().unsigned_abs();
    let step = match asked {
        Some(Span(step)) => step.as_secs(),
        None => span.div_ceil(STEPS_DEFAULT).next_multiple_of(60).max(60),
    };
    if step == 0 || !step.is_multiple_of(60) {
        return Err(Problem::bad_request("step must be whole minutes, such as 5m"));
    }
    if span.div_ceil(step) > STEPS_MAX {
        return Err(Problem::bad_request(&format!(
            "from and to are more than {STEPS_MAX} steps apart: ask for a longer step"
        )));
    }
    Ok(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_whole_minutes_and_an_answer_has_a_bounded_number_of_them() {
        let check = |span: i64, asked: Option<u64>, expected: Option<u64>| {
            let from = Timestamp::from_second(1_000_000).unwrap();
            let to = Timestamp::from_second(1_000_000 + span).unwrap();
            let asked = asked.map(|seconds| Span(Duration::from_secs(seconds)));
            assert_eq!(step(from, to, asked).ok(), expected, "{span} {asked:?}");
        };
        check(3_600, None, Some(60));
        check(86_400, None, Some(1_440));
        check(5, None, Some(60));
        check(3_600, Some(300), Some(300));
        check(3_600, Some(90), None);
        check(3_600, Some(0), None);
        check(0, None, None);
        check(-60, None, None);
        check(366 * 86_400, Some(60), None);
        check(366 * 86_400, Some(86_400), Some(86_400));
    }
}
