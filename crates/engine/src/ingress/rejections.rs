//! The last refused requests, for operators. Noting a request costs a few bytes and a lock that the
//! request never waits for. The number of notes per second is bounded, so a flood of forged requests is
//! sampled.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use hapax_core::SourceName;
use hapax_core::store::{REJECTIONS_KEPT, Rejection};

use crate::limits::{REJECTION_TEXT_BYTES_MAX, REJECTIONS_NOTED_PER_SECOND};

/// The rejections of every source since they were last taken.
#[derive(Debug, Default)]
pub(crate) struct RejectionLog {
    by_source: Mutex<HashMap<Box<str>, Notes>>,
}

#[derive(Debug, Default)]
struct Notes {
    /// The second of the last note, and how many were noted in it.
    second: i64,
    in_second: u32,
    newest: VecDeque<Rejection>,
}

impl RejectionLog {
    /// Whether a rejection of this second may be noted. If so, it counts as noted. Only then does the caller
    /// read the claims of the request.
    pub(crate) fn admits(&self, source: &str, second: i64) -> bool {
        let Ok(mut by_source) = self.by_source.try_lock() else { return false };
        if !by_source.contains_key(source) {
            by_source.insert(source.into(), Notes::default());
        }
        let Some(notes) = by_source.get_mut(source) else { return false };
        if notes.second != second {
            (notes.second, notes.in_second) = (second, 0);
        }
        notes.in_second += 1;
        notes.in_second <= REJECTIONS_NOTED_PER_SECOND
    }

    /// Notes a rejection that was admitted.
    pub(crate) fn note(&self, mut rejection: Rejection) {
        for text in [&mut rejection.detail, &mut rejection.claimed_id].into_iter().flatten() {
            let most = text.len().min(REJECTION_TEXT_BYTES_MAX);
            let end = (0..=most).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
            text.truncate(end);
        }
        let Ok(mut by_source) = self.by_source.try_lock() else { return };
        let notes = by_source.entry(rejection.source.as_str().into()).or_default();
        if notes.newest.len() == REJECTIONS_KEPT {
            notes.newest.pop_front();
        }
        notes.newest.push_back(rejection);
    }

    /// Removes and returns all rejections.
    pub(crate) fn take(&self) -> Vec<Rejection> {
        let mut by_source = self.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        by_source.values_mut().flat_map(|notes| std::mem::take(&mut notes.newest)).collect()
    }

    /// Forgets each source that is no longer served and has no rejections left.
    pub(crate) fn retain(&self, is_served: impl Fn(&SourceName) -> bool) {
        let mut by_source = self.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        by_source.retain(|source, notes| {
            !notes.newest.is_empty() || is_served(&SourceName::new(&**source))
        });
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::Timestamp;
    use uuid::Uuid;

    use super::*;

    fn rejection(source: &str, n: u128) -> Rejection {
        Rejection {
            source: SourceName::new(source),
            at: Timestamp::UNIX_EPOCH,
            request_id: Uuid::from_u128(n),
            remote: None,
            reason: "signature".to_owned(),
            detail: None,
            claimed_id: Some("é".repeat(1_000)),
        }
    }

    #[test]
    fn a_flood_is_sampled_and_leaves_other_sources_alone() {
        let log = RejectionLog::default();
        let mut noted = 0;
        for n in 0..10_000 {
            if log.admits("shop", 7) {
                log.note(rejection("shop", n));
                noted += 1;
            }
        }
        assert_eq!(noted, REJECTIONS_NOTED_PER_SECOND);
        assert!(log.admits("mail", 7) && log.admits("shop", 8));
        log.note(rejection("mail", 1));
        for n in 0..500 {
            log.note(rejection("shop", n));
        }
        let taken = log.take();
        let of = |source: &str| taken.iter().filter(|one| one.source.as_str() == source).count();
        assert_eq!(
            (of("shop"), of("mail"), taken.len()),
            (REJECTIONS_KEPT, 1, REJECTIONS_KEPT + 1)
        );
        let longest = taken.iter().filter_map(|one| one.claimed_id.as_ref()).map(String::len).max();
        assert_eq!(longest, Some(REJECTION_TEXT_BYTES_MAX - 1), "cut between two characters");
        assert!(log.take().is_empty());
    }
}
