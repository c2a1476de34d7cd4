//! How much one link may ask of this node.

use governor::{DefaultKeyedRateLimiter, Quota};
use hapax_core::limits::{PORTAL_FORMS_PER_MINUTE, PORTAL_REFUSALS_PER_MINUTE};
use hapax_core::store::PortalLinkId;

use super::super::problem::Problem;

/// From this many links on, those that were quiet for a minute are forgotten.
const LINKS_KEPT: usize = 10_000;

/// The forms of each link within a minute.
pub(super) struct LinkLimits {
    forms: DefaultKeyedRateLimiter<PortalLinkId>,
    refusals: DefaultKeyedRateLimiter<PortalLinkId>,
}

impl Default for LinkLimits {
    fn default() -> Self {
        let keyed = |a_minute: u32| {
            let quota = Quota::per_minute(a_minute.try_into().expect("not zero"));
            governor::RateLimiter::keyed(quota)
        };
        Self { forms: keyed(PORTAL_FORMS_PER_MINUTE), refusals: keyed(PORTAL_REFUSALS_PER_MINUTE) }
    }
}

impl LinkLimits {
    /// Admits a form of the link, or says that it has sent too many.
    pub(super) fn admit_form(&self, link: PortalLinkId) -> Result<(), Problem> {
        if has_room(&self.forms, link) {
            return Ok(());
        }
        Err(Problem::limited(
            &format!("at most {PORTAL_FORMS_PER_MINUTE} forms a minute: try again later"),
            1,
        ))
    }

    /// Whether the audit trail records one more form of the link that was refused or failed.
    pub(super) fn records_refusal(&self, link: PortalLinkId) -> bool {
        has_room(&self.refusals, link)
    }
}

fn has_room(limiter: &DefaultKeyedRateLimiter<PortalLinkId>, link: PortalLinkId) -> bool {
    if limiter.len() > LINKS_KEPT {
        limiter.retain_recent();
    }
    limiter.check_key(&link).is_ok()
}
