//! One page of a list that is searched row by row, from new to old, until it is full or its bound is reached.
//! A search that is continued from the cursor of the page before reads each row once.
//!
//! A list that searches for a text has two parts: first the exact matches, then all other matches. The
//! highest bit of a cursor is set in the second part.

use std::ops::ControlFlow;
use std::time::Instant;

use hapax_core::Timestamp;
use hapax_core::store::{Cursor, EventFilter, Page, ReadBound};

use uuid::Uuid;

use crate::limits::PAGE_MAX;

/// Set in cursors of the second part. Row numbers, and ids that are made in the next four thousand years, do
/// not have this bit.
const REST: u128 = 1 << 127;

/// The parts of a list that are left to read, each with the cursor that it continues from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parts {
    /// The list has one part.
    One(Option<Cursor>),
    /// The exact matches, then the other events from the start.
    Both(Option<Cursor>),
    /// The others only.
    Rest(Cursor),
}

impl Parts {
    pub(crate) fn of(filter: &EventFilter) -> Self {
        let is_exact = filter.text.as_ref().is_some_and(|text| text.is_exact());
        match filter.before {
            before if !is_exact => Self::One(before),
            Some(Cursor(before)) if before & REST != 0 => Self::Rest(Cursor(before & !REST)),
            before => Self::Both(before),
        }
    }
}

/// A cursor in the second part.
pub(crate) fn in_rest(Cursor(at): Cursor) -> Cursor {
    Cursor(at | REST)
}

/// The time at which a request with this id began; `None` if the id was not issued by Hapax.
pub(crate) fn began_at(request: Uuid) -> Option<Timestamp> {
    let millis = i64::try_from(request.as_u128() >> 80).ok()?;
    let is_ours = request.get_version_num() == 7;
    Timestamp::from_millisecond(millis).ok().filter(|_| is_ours)
}

/// Rows that a page reads even if its time is over, because they take only a few milliseconds of work. On an
/// overloaded machine most of the time passes while other threads run.
const LIST_ROWS_SURE: usize = 500;

/// A page that has read fewer than [`LIST_ROWS_SURE`] rows may take this many times the time of its bound.
const BUSY_FACTOR: u32 = 5;

/// The remaining part of a [`ReadBound`].
#[derive(Debug)]
pub(crate) struct ReadBudget {
    bound: ReadBound,
    began: Instant,
    rows: usize,
}

impl ReadBudget {
    pub(crate) fn begin(bound: ReadBound) -> Self {
        Self { bound, began: Instant::now(), rows: 0 }
    }

    /// Notes that rows were read.
    pub(crate) fn spend(&mut self, rows: usize) {
        self.rows += rows;
    }

    /// Whether the page must end. A page never ends before a row was read.
    pub(crate) fn is_spent(&self) -> bool {
        self.rows > 0
            && match self.bound {
                ReadBound::Time(most) => {
                    let took = self.began.elapsed();
                    took >= most && (self.rows >= LIST_ROWS_SURE || took >= most * BUSY_FACTOR)
                }
                ReadBound::Rows(most) => self.rows >= most,
            }
    }

    /// How many rows one statement may read next, if it asks for `wanted`.
    pub(crate) fn slice(&self, wanted: usize) -> usize {
        match self.bound {
            ReadBound::Time(_) => wanted,
            ReadBound::Rows(most) => wanted.min(most.saturating_sub(self.rows).max(1)),
        }
    }
}

/// A page under construction.
#[derive(Debug)]
pub(crate) struct PageSearch<T> {
    budget: ReadBudget,
    limit: usize,
    found: Vec<(Cursor, T)>,
    /// The row that was read last, with its time.
    last: Option<(Cursor, Timestamp)>,
    end: SearchEnd,
    is_rest: bool,
}

/// Why the search of a page ended.
#[derive(Debug, PartialEq, Eq)]
enum SearchEnd {
    /// No row is left.
    Rows,
    /// The page is full, and a further item exists.
    Full,
    /// The bound is reached.
    Bound,
}

impl<T> PageSearch<T> {
    pub(crate) fn begin(limit: usize, bound: ReadBound) -> Self {
        Self {
            budget: ReadBudget::begin(bound),
            limit: limit.clamp(1, PAGE_MAX),
            found: Vec::new(),
            last: None,
            end: SearchEnd::Rows,
            is_rest: false,
        }
    }

    /// Begins the second part of the list, unless the page has ended. Returns whether the page
    /// continues.
    pub(crate) fn begin_rest(&mut self) -> bool {
        self.is_rest = true;
        self.end == SearchEnd::Rows
    }

    /// Takes the next row, with its item if the row matches. Breaks if the search is over.
    pub(crate) fn take(&mut self, at: Cursor, time: Timestamp, item: Option<T>) -> ControlFlow<()> {
        let at = if self.is_rest { in_rest(at) } else { at };
        if let Some(item) = item {
            if self.found.len() == self.limit {
                self.end = SearchEnd::Full;
                return ControlFlow::Break(());
            }
            self.found.push((at, item));
        }
        self.last = Some((at, time));
        self.budget.spend(1);
        if self.budget.is_spent() {
            self.end = SearchEnd::Bound;
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    pub(crate) fn page(self) -> Page<T> {
        let is_full = self.found.len() == self.limit;
        let next = match self.end {
            SearchEnd::Rows => None,
            SearchEnd::Full => self.found.last().map(|(at, _)| *at),
            SearchEnd::Bound => self.last.map(|(at, _)| at),
        };
        let stopped = self.end == SearchEnd::Bound && !is_full;
        Page {
            items: self.found.into_iter().map(|(_, item)| item).collect(),
            next,
            searched_to: self.last.filter(|_| stopped).map(|(_, time)| time),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn search(rows: &[(u128, bool)], limit: usize, bound: ReadBound) -> Page<u128> {
        let mut search = PageSearch::begin(limit, bound);
        for (at, fits) in rows {
            let time = Timestamp::from_second(*at as i64).expect("in range");
            if search.take(Cursor(*at), time, fits.then_some(*at)).is_break() {
                break;
            }
        }
        search.page()
    }

    #[test]
    fn a_page_ends_where_the_next_one_begins() {
        let rows = [(9, true), (8, false), (7, true), (6, false), (5, false), (4, true)];
        let all = search(&rows, 10, ReadBound::Rows(100));
        assert_eq!((all.items, all.next, all.searched_to), (vec![9, 7, 4], None, None));
        let full = search(&rows, 2, ReadBound::Rows(100));
        assert_eq!((full.items, full.next, full.searched_to), (vec![9, 7], Some(Cursor(7)), None));
        // The page is full and no row follows, so the page must have no cursor, which would lead to
        // an empty page.
        let last = search(&rows, 3, ReadBound::Rows(100));
        assert_eq!((last.items.len(), last.next), (3, None));
        let short = search(&rows, 10, ReadBound::Rows(5));
        assert_eq!((short.items, short.next), (vec![9, 7], Some(Cursor(5))));
        assert_eq!(short.searched_to, Timestamp::from_second(5).ok());
        // Even with a bound of zero, one row is read.
        let one = search(&rows, 10, ReadBound::Time(Duration::ZERO));
        assert_eq!((one.items, one.next), (vec![9], Some(Cursor(9))));
    }

    #[test]
    fn an_overloaded_machine_still_fills_a_page_of_a_few_rows() {
        // The time is over before the first row, because other threads run. A list of a few rows would come in
        // several pages of one row each.
        let is_spent = |rows, late: u32| {
            let most = Duration::from_secs(1);
            let began =
                Instant::now().checked_sub(most * late).expect("the machine runs that long");
            ReadBudget { bound: ReadBound::Time(most), began, rows }.is_spent()
        };
        assert!(!is_spent(LIST_ROWS_SURE, 0));
        assert!(!is_spent(LIST_ROWS_SURE - 1, 1));
        assert!(is_spent(LIST_ROWS_SURE, 1));
        // In any case the page ends after a multiple of its time.
        assert!(is_spent(1, BUSY_FACTOR));
        assert!(!is_spent(0, BUSY_FACTOR), "every page reads a row");
    }
}
