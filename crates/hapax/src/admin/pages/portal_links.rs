//! The page of links to the portal: which are open, for whom, and until when.

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use hapax_core::Tenant;
use hapax_core::store::PortalLinkId;
use uuid::Uuid;

use super::super::portal::links::{LISTED_MAX, open_link, open_links};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore};
use super::actions::{ActionForm, ActionRequest, ActionResult, PageAction, Question};
use super::filters::Filters;
use super::{Frame, Page, PageReader};
use crate::api::PortalLink;
use crate::format;

#[derive(Template)]
#[template(path = "portal_links.html")]
pub(in crate::admin) struct PortalLinksPage {
    frame: Frame,
    tenant: Option<String>,
    /// Whether the server has a portal.
    has_portal: bool,
    items: Vec<PortalLink>,
    /// Whether there may be older links that are not listed.
    is_cut: bool,
    done: Option<String>,
}

/// `GET /portal`.
pub(in crate::admin) async fn portal_links<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<PortalLinksPage>, Problem> {
    let tenant = filters.get("tenant");
    let links = open_links(&admin, tenant.as_ref().map(Tenant::new)).await?;
    let page = PortalLinksPage {
        frame: reader.frame(&admin, "/portal").await,
        tenant,
        has_portal: admin.portal_url.is_some(),
        is_cut: links.len() == LISTED_MAX,
        items: links.into_iter().map(PortalLink::from).collect(),
        done: filters.done(),
    };
    Ok(reader.page(page))
}

/// Revokes a link.
pub(in crate::admin) struct RevokePortalLink;

impl<S: AdminStore> PageAction<S> for RevokePortalLink {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let id = parsed(&id)?;
        let link = open_link(&admin, None, id).await?.ok_or_else(unknown)?;
        let entered = match link.entered_at {
            Some(at) => {
                format!("A browser used this link at {}, and is logged out.", format::at(at))
            }
            None => "No browser has used this link. Its URL stops working.".to_owned(),
        };
        Ok(Question {
            title: "Revoke this link to the portal?".to_owned(),
            subject: format!("of the tenant {}", link.tenant),
            sentences: vec![entered],
            button: "Revoke",
            is_final: true,
            back: "/portal".to_owned(),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        _: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let id = parsed(&id)?;
        admin.store.end_portal_link(id).await?;
        tracing::info!(token = caller.who(), "{} revoked the portal link {id}", caller.who());
        let sentence = "The link is revoked.".to_owned();
        Ok(ActionResult { page: "/portal".to_owned(), sentence, ..ActionResult::default() })
    }
}

fn parsed(id: &str) -> Result<PortalLinkId, Problem> {
    id.parse::<Uuid>().map(PortalLinkId).map_err(|_| unknown())
}

fn unknown() -> Problem {
    Problem::not_found("no link has that id, or it has ended")
}
