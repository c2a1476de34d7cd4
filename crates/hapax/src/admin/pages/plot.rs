//! A plot of traffic: stacked bars of new events, copies and rejected requests, as numbers for an SVG.

use hapax_core::Timestamp;

use crate::api::{History, HistoryPoint};

/// The size of the plot in its own units.
const WIDTH: u64 = 720;
const HEIGHT: u64 = 100;

/// The bars of a plot.
pub(super) struct Plot {
    pub(super) bars: Vec<Bar>,
    /// The most requests of one step, which is the height of the plot.
    pub(super) most: u64,
    pub(super) step_minutes: u64,
}

/// One step. The parts of a bar are stacked.
pub(super) struct Bar {
    pub(super) x: u64,
    pub(super) width: u64,
    pub(super) parts: [Part; 3],
    pub(super) point: HistoryPoint,
}

/// A part of a bar.
pub(super) struct Part {
    pub(super) class: &'static str,
    pub(super) y: u64,
    pub(super) height: u64,
}

impl Plot {
    /// The plot of a history that ends at `to` and has `span` seconds.
    pub(super) fn of(history: History, to: Timestamp, span: u64) -> Self {
        let step = history.step_seconds.max(1);
        let slots = span.div_ceil(step).max(1) + 1;
        let last = to.as_second().unsigned_abs() / step;
        let total = |point: &HistoryPoint| point.new + point.copies + point.rejected;
        let most = history.items.iter().map(total).max().unwrap_or(0);
        let bar = |point: HistoryPoint| {
            let slot = point.at.as_second().unsigned_abs() / step;
            let behind = last.saturating_sub(slot).min(slots - 1);
            let left = (slots - 1 - behind) * WIDTH / slots;
            let right = (slots - behind) * WIDTH / slots;
            // A count that is not zero is always visible.
            let height = |count: u64| match count {
                0 => 0,
                count => {
                    (u128::from(count) * u128::from(HEIGHT) / u128::from(most.max(1))).max(1) as u64
                }
            };
            let (new, copies) = (height(point.new), height(point.copies));
            let rejected = height(point.rejected);
            let part = |class, height: u64, below: u64| Part {
                class,
                y: HEIGHT.saturating_sub(height + below),
                height,
            };
            let parts = [
                part("new", new, 0),
                part("copies", copies, new),
                part("rejected", rejected, new + copies),
            ];
            Bar { x: left, width: (right - left).saturating_sub(1).max(1), parts, point }
        };
        let bars = history.items.into_iter().map(bar).collect();
        Self { bars, most, step_minutes: step / 60 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_is_inside_the_plot_and_every_count_is_visible() {
        let to = Timestamp::from_second(36_000 * 60).unwrap();
        let point = |minutes: i64, new, copies, rejected| HistoryPoint {
            at: Timestamp::from_second((36_000 - minutes) * 60).unwrap(),
            new,
            copies,
            conflicts: 0,
            rejected,
            unavailable: 0,
        };
        let items = vec![point(60, 1, 0, 0), point(30, u64::MAX / 4, 1, 1), point(0, 5, 5, 5)];
        let plot = Plot::of(History { step_seconds: 60, items, next: None }, to, 3_600);
        for bar in &plot.bars {
            assert!(bar.x + bar.width <= WIDTH, "{} {}", bar.x, bar.width);
            for part in &bar.parts {
                assert!(part.y + part.height <= HEIGHT + 2, "{} {}", part.y, part.height);
            }
        }
        let heights: Vec<_> =
            plot.bars.iter().map(|bar| bar.parts.each_ref().map(|part| part.height)).collect();
        assert_eq!(heights, [[1, 0, 0], [99, 1, 1], [1, 1, 1]]);
        assert!(plot.bars[0].x < plot.bars[1].x && plot.bars[1].x < plot.bars[2].x);
    }
}
