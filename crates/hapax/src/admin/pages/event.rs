//! The page of one event: its summary, its timeline, its jobs, and its content in five forms.

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::job::Phase;
use hapax_core::presets::{self, Preset};

use super::super::extract::PathId;
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, events as api_events};
use super::filters::Filters;
use super::{Frame, Page, PageReader, curl, text};
use crate::api::{Arrival, Event};
use crate::story::{self, Step};

#[derive(Template)]
#[template(path = "event.html")]
pub(in crate::admin) struct EventPage {
    frame: Frame,
    event: Event,
    /// The outcome of the event, in one sentence.
    summary: String,
    /// Further notes for the operator.
    notes: Vec<String>,
    timeline: Vec<TimelineRow>,
    tabs: [Tab; 5],
    tab: Tab,
    /// The indented body.
    pretty: String,
    /// The command of the tab `curl`.
    curl: String,
    /// The preset of the sender, which describes how the sender signs; `None` for a custom source.
    preset: Option<&'static Preset>,
    done: Option<String>,
}

/// A form in which the page shows the event's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tab {
    Pretty,
    Raw,
    Headers,
    Signature,
    Curl,
}

impl Tab {
    const ALL: [Self; 5] = [Self::Pretty, Self::Raw, Self::Headers, Self::Signature, Self::Curl];

    fn as_str(&self) -> &'static str {
        match self {
            Self::Pretty => "pretty",
            Self::Raw => "raw",
            Self::Headers => "headers",
            Self::Signature => "signature",
            Self::Curl => "curl",
        }
    }

    /// The tab that the address names. Any other name is the first tab.
    fn of(filters: &Filters) -> Self {
        let asked = filters.get("tab").unwrap_or_default();
        Self::ALL.into_iter().find(|tab| tab.as_str() == asked).unwrap_or(Self::Pretty)
    }
}

/// A step, and the part of its time that differs from the step before.
struct TimelineRow {
    step: Step,
    shown: ShownTime,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShownTime {
    /// Date and time: the first step of a day.
    Full,
    /// The time of day.
    Clock,
    /// The same second as the step before.
    Same,
}

impl TimelineRow {
    /// The rows of steps in order.
    fn of(steps: Vec<Step>) -> Vec<Self> {
        let mut before: Option<String> = None;
        let row = |step: Step| {
            let now = step.at.strftime("%Y-%m-%d %H:%M:%S").to_string();
            let shown = match &before {
                Some(before) if *before == now => ShownTime::Same,
                Some(before) if before[..10] == now[..10] => ShownTime::Clock,
                Some(_) | None => ShownTime::Full,
            };
            before = Some(now);
            Self { step, shown }
        };
        steps.into_iter().map(row).collect()
    }

    fn is_same(&self) -> bool {
        self.shown == ShownTime::Same
    }

    /// The time as it is written.
    fn time(&self) -> String {
        let form = match self.shown {
            ShownTime::Full => "%Y-%m-%d %H:%M:%SZ",
            ShownTime::Clock | ShownTime::Same => "%H:%M:%SZ",
        };
        self.step.at.strftime(form).to_string()
    }
}

/// `GET /events/{id}`.
pub(in crate::admin) async fn event<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    PathId(id): PathId,
    filters: Filters,
) -> Result<Page<EventPage>, Problem> {
    let frame = reader.frame(&admin, "/events").await;
    let (now, public_url) = ((admin.now)(), admin.public_url.load_full());
    let caller = Extension(reader.caller()?);
    let Json(event) = api_events::show(State(admin), caller, PathId(id)).await?;
    let tab = Tab::of(&filters);
    let page = EventPage {
        frame,
        summary: story::summary(&event, now),
        notes: story::notes(&event),
        timeline: TimelineRow::of(story::timeline(&event)),
        tabs: Tab::ALL,
        tab,
        pretty: match (tab, &event.body.body) {
            (Tab::Pretty, Some(body)) => text::indented(body),
            (_, _) => String::new(),
        },
        curl: match tab {
            Tab::Curl => curl::command(&public_url, &event),
            Tab::Pretty | Tab::Raw | Tab::Headers | Tab::Signature => String::new(),
        },
        preset: scheme(&event).and_then(presets::find),
        event,
        done: filters.done(),
    };
    Ok(reader.page(page))
}

fn scheme(event: &Event) -> Option<&str> {
    event.arrivals.first()?.scheme.as_deref()
}

impl EventPage {
    /// Whether a job of the event is a dead letter. The event itself may have another status, such as that of another
    /// job in review.
    fn has_dead_letter(&self) -> bool {
        self.event.jobs.iter().any(|job| job.status == Phase::Dead)
    }

    /// The difference between the signed time of an arrival and the server's time, in words.
    fn skew(&self, arrival: &Arrival) -> String {
        arrival.signed_at.map(|at| story::skew(at, arrival.received_at)).unwrap_or_default()
    }
}
