//! The plots of the overview, as paths for an SVG: stacked bars of new events, copies and rejected requests; the
//! slowest acknowledgements; and how many jobs waited. All bars of one kind are one path, so a plot of 60 steps stays
//! small.

use std::fmt::Write as _;

use hapax_core::Timestamp;

use crate::api::{History, HistoryPoint};

/// The size of a plot in its own units.
const WIDTH: u64 = 720;
const HEIGHT: u64 = 100;

/// The bars of the plots.
pub(super) struct Plot {
    pub(super) bars: Vec<Bar>,
    /// The most requests of one step, which is the height of the first plot.
    pub(super) most: u64,
    /// The longest p99 of an acknowledgement, in seconds.
    pub(super) ack_most: Option<f64>,
    /// The most jobs that waited.
    pub(super) waiting_most: u64,
    pub(super) step_minutes: u64,
}

/// One step.
pub(super) struct Bar {
    pub(super) x: u64,
    width: u64,
    /// New events, with copies and rejected requests stacked on top.
    new: BarPart,
    copies: BarPart,
    rejected: BarPart,
    /// The p99 of acknowledgements, in a plot of its own.
    ack: BarPart,
    /// The jobs that waited, in a plot of its own.
    waiting: BarPart,
    pub(super) point: HistoryPoint,
}

/// A part of a bar.
struct BarPart {
    y: u64,
    height: u64,
}

impl Plot {
    /// The plots of a history that ends at `to` and has `span` seconds.
    pub(super) fn of(history: History, to: Timestamp, span: u64) -> Self {
        let step = history.step_seconds.max(1);
        let slots = span.div_ceil(step).max(1) + 1;
        let last = to.as_second().unsigned_abs() / step;
        let total = |point: &HistoryPoint| point.new + point.copies + point.rejected;
        let most = history.items.iter().map(total).max().unwrap_or(0);
        let waiting_most = history.items.iter().map(|point| point.waiting).max().unwrap_or(0);
        let slowest = history.items.iter().filter_map(|point| point.ack_seconds.p99);
        let ack_most = slowest.max_by(f64::total_cmp);
        let bar = |point: HistoryPoint| {
            let slot = point.at.as_second().unsigned_abs() / step;
            let behind = last.saturating_sub(slot).min(slots - 1);
            let left = (slots - 1 - behind) * WIDTH / slots;
            let right = (slots - behind) * WIDTH / slots;
            let new = height(point.new, most);
            let copies = height(point.copies, most);
            let rejected = height(point.rejected, most);
            let micros = |seconds: Option<f64>| (seconds.unwrap_or_default() * 1e6) as u64;
            let ack = height(micros(point.ack_seconds.p99), micros(ack_most));
            Bar {
                x: left,
                width: (right - left).saturating_sub(1).max(1),
                new: part(new, 0),
                copies: part(copies, new),
                rejected: part(rejected, new + copies),
                ack: part(ack, 0),
                waiting: part(height(point.waiting, waiting_most), 0),
                point,
            }
        };
        let bars = history.items.into_iter().map(bar).collect();
        Self { bars, most, ack_most, waiting_most, step_minutes: step / 60 }
    }

    /// The bars of new events.
    pub(super) fn new_events(&self) -> String {
        self.path(|bar| &bar.new)
    }

    /// The bars of copies.
    pub(super) fn copies(&self) -> String {
        self.path(|bar| &bar.copies)
    }

    /// The bars of rejected requests.
    pub(super) fn rejected(&self) -> String {
        self.path(|bar| &bar.rejected)
    }

    /// The bars of the slowest acknowledgements.
    pub(super) fn acks(&self) -> String {
        self.path(|bar| &bar.ack)
    }

    /// The bars of the jobs that waited.
    pub(super) fn waiting(&self) -> String {
        self.path(|bar| &bar.waiting)
    }

    /// One path with the same part of every bar.
    fn path(&self, part: impl Fn(&Bar) -> &BarPart) -> String {
        let mut path = String::new();
        for bar in &self.bars {
            let BarPart { y, height } = part(bar);
            if *height > 0 {
                let (x, width) = (bar.x, bar.width);
                write!(path, "M{x} {y}h{width}v{height}h-{width}")
                    .expect("a string takes all text");
            }
        }
        path
    }
}

/// The height of the bar for `count`, if the bar for `most` has the full height. A count that is not zero is always
/// visible.
fn height(count: u64, most: u64) -> u64 {
    match count {
        0 => 0,
        count => (u128::from(count) * u128::from(HEIGHT) / u128::from(most.max(1))).max(1) as u64,
    }
}

fn part(height: u64, below: u64) -> BarPart {
    BarPart { y: HEIGHT.saturating_sub(height + below), height }
}

#[cfg(test)]
mod tests {
    use hapax_core::store::TrafficFigures;

    use super::*;

    #[test]
    fn every_bar_is_inside_the_plot_and_every_count_is_visible() {
        let to = Timestamp::from_second(36_000 * 60).unwrap();
        let point = |minutes: i64, new, copies, rejected| {
            let at = Timestamp::from_second((36_000 - minutes) * 60).unwrap();
            let mut point = HistoryPoint::of(at, &TrafficFigures::default());
            (point.new, point.copies, point.rejected, point.waiting) = (new, copies, rejected, new);
            point.ack_seconds.p99 = Some(1.0 / minutes.max(1) as f64);
            point
        };
        let items = vec![point(60, 1, 0, 0), point(30, u64::MAX / 4, 1, 1), point(0, 5, 5, 5)];
        let plot = Plot::of(History { step_seconds: 60, items, next: None }, to, 3_600);
        for bar in &plot.bars {
            assert!(bar.x + bar.width <= WIDTH, "{} {}", bar.x, bar.width);
            for part in [&bar.new, &bar.copies, &bar.rejected, &bar.ack, &bar.waiting] {
                assert!(part.y + part.height <= HEIGHT + 2, "{} {}", part.y, part.height);
            }
        }
        let heights = plot.bars.iter().map(|bar| [&bar.new, &bar.copies, &bar.rejected]);
        let heights: Vec<_> = heights.map(|parts| parts.map(|part| part.height)).collect();
        assert_eq!(heights, [[1, 0, 0], [99, 1, 1], [1, 1, 1]]);
        assert_eq!(plot.copies().matches('M').count(), 2, "{}", plot.copies());
        let others = plot.bars.iter().map(|bar| [bar.ack.height, bar.waiting.height]);
        assert_eq!(others.collect::<Vec<_>>(), [[1, 1], [3, 100], [100, 1]]);
        assert!(plot.bars[0].x < plot.bars[1].x && plot.bars[1].x < plot.bars[2].x);
    }
}
