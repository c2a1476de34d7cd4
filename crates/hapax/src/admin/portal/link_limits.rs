//! How much one link may ask of this node.

use governor::{DefaultKeyedRateLimiter, Quota};
use hapax_core::limits::{
    PORTAL_FORMS_PER_MINUTE, PORTAL_PAGES_AT_ONCE, PORTAL_PAGES_PER_SECOND,
    PORTAL_REFUSALS_PER_MINUTE,
};
use hapax_core::store::PortalLinkId;

use super::super::problem::Problem;

/// Above this number of links, links without a request in the last minute are forgotten.
const LINKS_KEPT: usize = 10_000;

/// The rate limits of each link, for pages, forms and recorded refusals.
pub(super) struct LinkLimits {
    pages: DefaultKeyedRateLimiter<PortalLinkId>,
    forms: DefaultKeyedRateLimiter<PortalLinkId>,
    refusals: DefaultKeyedRateLimiter<PortalLinkId>,
}

impl Default for LinkLimits {
    fn default() -> Self {
        let keyed = |a_minute: u32| {
            let quota = Quota::per_minute(a_minute.try_into().expect("not zero"));
            governor::RateLimiter::keyed(quota)
        };
        let pages = Quota::per_second(PORTAL_PAGES_PER_SECOND.try_into().expect("not zero"))
            .allow_burst(PORTAL_PAGES_AT_ONCE.try_into().expect("not zero"));
        Self {
            pages: governor::RateLimiter::keyed(pages),
            forms: keyed(PORTAL_FORMS_PER_MINUTE),
            refusals: keyed(PORTAL_REFUSALS_PER_MINUTE),
        }
    }
}

impl LinkLimits {
    /// Admits a request for a page, or says that there were too many.
    pub(super) fn admit_page(&self, link: PortalLinkId) -> Result<(), Problem> {
        if has_room(&self.pages, link) {
            return Ok(());
        }
        Err(Problem::limited(
            &format!("at most {PORTAL_PAGES_PER_SECOND} pages per second: try again later"),
            1,
        ))
    }

    /// Admits a form of the link, or says that it has sent too many.
    pub(super) fn admit_form(&self, link: PortalLinkId) -> Result<(), Problem> {
        if has_room(&self.forms, link) {
            return Ok(());
        }
        Err(Problem::limited(
            &format!("at most {PORTAL_FORMS_PER_MINUTE} forms per minute: try again later"),
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
