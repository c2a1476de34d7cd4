//! Groups dead letters by their error and counts them.

use std::cmp::Reverse;
use std::collections::HashMap;

use hapax_core::Timestamp;
use hapax_core::store::{DeadGroup, DeadGroups};

/// The groups that were found so far.
#[derive(Debug, Default)]
pub(crate) struct DeadGroupSums(HashMap<String, DeadGroup>);

impl DeadGroupSums {
    /// Adds a dead letter that ended at this time.
    pub(crate) fn add(&mut self, error: &str, at: Timestamp) {
        match self.0.get_mut(error) {
            Some(group) => {
                group.count += 1;
                group.first = group.first.min(at);
                group.last = group.last.max(at);
            }
            None => {
                let group = DeadGroup { error: error.to_owned(), count: 1, first: at, last: at };
                self.0.insert(error.to_owned(), group);
            }
        }
    }

    /// The largest groups.
    pub(crate) fn groups(self, limit: usize, searched_to: Option<Timestamp>) -> DeadGroups {
        let mut groups: Vec<DeadGroup> = self.0.into_values().collect();
        let letters = groups.iter().map(|group| group.count).sum();
        let errors = groups.len() as u64;
        groups.sort_by(|a, b| {
            let order = |group: &DeadGroup| Reverse((group.count, group.last));
            order(a).cmp(&order(b)).then_with(|| a.error.cmp(&b.error))
        });
        groups.truncate(limit);
        DeadGroups { groups, letters, errors, searched_to }
    }
}
