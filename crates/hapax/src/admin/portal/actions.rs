//! The actions that the holder of a link may take. If an action of the dashboard shows nothing that is meant
//! for operators, the portal uses it. The other actions are here.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{FromRequestParts, OriginalUri, State};
use axum::{Extension, Json};
use hapax_core::endpoint::{AddressChoice, DisabledBy};
use hapax_core::endpoint_secret::Signing;
use hapax_core::ledger::Quota;
use hapax_core::limits::{PORTAL_PINGS_MAX, PORTAL_PINGS_WITHIN};

use super::super::extract::{JsonBody, PathId};
use super::super::pages::{
    Acted, ActionForm, ActionRequest, ActionResult, Confirm, DisableEndpoint, EnableEndpoint,
    Filters, FormField, Forms, Page, PageAction, PageReader, PingEndpoint, PlanDeliveries,
    Question, act_once, rate, rate_of, recorded,
};
use super::super::problem::Problem;
use super::super::{AdminStore, endpoints, plans};
use super::Portal;
use super::guard::Visitor;
use super::own::Own;
use super::view::outcome;
use crate::api::{EndpointRequest, Patch, ReasonRequest};

/// The forms of one link that are remembered for a day: more than a person sends in a day, and few enough for the
/// database.
const FORMS: Quota = Quota { keys: 2_000, bytes: 4 << 20 };

/// The page that asks before an action.
pub(super) async fn ask<S, O, A>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
    OriginalUri(uri): OriginalUri,
    own: O,
    filters: Filters,
) -> Result<Page<Confirm>, Problem>
where
    S: AdminStore,
    O: Own + FromRequestParts<Arc<Portal<S>>, Rejection = Problem>,
    A: PageAction<S>,
{
    let admin = Arc::clone(&portal.admin);
    let asked = ActionRequest { admin, caller: visitor.caller(), id: own.id(), filters };
    let question = A::question(asked).await?;
    Ok(reader.page(Confirm::new(visitor.frame(&portal.site, ""), &uri, question)))
}

/// Acts once for each form. The form is read after the link was checked, so the link is checked again.
pub(super) async fn act<S, O, A>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
    OriginalUri(uri): OriginalUri,
    own: O,
    form: ActionForm,
) -> Result<Acted, Problem>
where
    S: AdminStore,
    O: Own + FromRequestParts<Arc<Portal<S>>, Rejection = Problem>,
    A: PageAction<S>,
{
    visitor.check_again(&portal).await?;
    let admin = Arc::clone(&portal.admin);
    let filters = Filters::of(&uri);
    let asked = ActionRequest { admin, caller: visitor.caller(), id: own.id(), filters };
    let under = format!("/p/{}", visitor.link().id);
    let forms = Forms { side: "portal", under: &under, quota: Some(FORMS) };
    let acted = act_once::<S, A>(&forms, asked, &uri, &form).await?;
    Ok(acted.into_answer(reader, visitor.frame(&portal.site, "")))
}

/// The fields that describe an endpoint.
fn fields(url: Option<String>, types: &[String], description: Option<String>) -> Vec<FormField> {
    vec![
        FormField {
            name: "url", label: "Address (https://…)", value: url, ..FormField::default()
        },
        FormField {
            name: "types",
            label: "Types, separated by commas, such as invoice.* (empty: all)",
            value: Some(types.join(", ")),
            ..FormField::default()
        },
        FormField {
            name: "description",
            label: "Description",
            value: description,
            ..FormField::default()
        },
    ]
}

/// The message types in the field `types`, separated by commas or line breaks.
fn types_of(form: &ActionForm) -> Vec<String> {
    let text = form.fields.get("types").unwrap_or_default();
    let types = text.split([',', '\n']).map(str::trim).filter(|name| !name.is_empty());
    types.map(str::to_owned).collect()
}

/// The custom headers in a field, one `Name: value` per line; `None` if the field is empty.
fn headers_of(form: &ActionForm) -> Result<Option<BTreeMap<String, String>>, Problem> {
    let Some(text) = form.fields.get("headers") else { return Ok(None) };
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let header = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.trim().to_owned(), value.trim().to_owned()))
    };
    let headers: Option<BTreeMap<_, _>> = lines.map(header).collect();
    let bad = || Problem::bad_request("headers: write one header per line, as Name: value");
    headers.map(Some).ok_or_else(bad)
}

/// Adds an endpoint. The `id` of the request is the tenant.
pub(super) struct AddEndpoint;

impl<S: AdminStore> PageAction<S> for AddEndpoint {
    async fn question(_: ActionRequest<S>) -> Result<Question, Problem> {
        let mut fields = fields(None, &[], None);
        fields.push(FormField {
            name: "signing",
            label: "Signature",
            value: Some(Signing::default().as_str().to_owned()),
            words: &["standard", "ed25519", "timestamped"],
            ..FormField::default()
        });
        fields.push(FormField {
            name: "headers",
            label: "Custom headers, one a line, as Name: value (never shown again)",
            has_lines: true,
            ..FormField::default()
        });
        Ok(Question {
            title: "Add an endpoint".to_owned(),
            sentences: vec![
                "It gets messages from now on. It must have a public address, on port 443 or 80."
                    .to_owned(),
                "The next page shows the secret that its deliveries are signed with, once."
                    .to_owned(),
            ],
            fields,
            button: "Add",
            back: "/".to_owned(),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id: tenant, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let signing = form.fields.only(&["signing"]).query::<SigningField>()?.0.signing;
        let asked = EndpointRequest {
            url: form.fields.get("url").map(|url| url.trim().to_owned()),
            tenant: Some(tenant),
            types: Patch::Set(types_of(form)),
            description: form.fields.get("description").into(),
            headers: headers_of(form)?.into(),
            signing,
            ..EndpointRequest::default()
        };
        let endpoint =
            endpoints::create_by(&admin, &caller, AddressChoice::Receiver, asked).await?;
        let sentence = match endpoint.secret {
            Some(_) => "The endpoint was added. Its secret is shown once.",
            None => "The endpoint was added. Its page shows the public key.",
        };
        let (page, sentence) = (format!("/endpoints/{}", endpoint.id), sentence.to_owned());
        Ok(ActionResult { page, sentence, secret: endpoint.secret, ..ActionResult::default() })
    }
}

/// The choice of a signature in a form.
#[derive(serde::Deserialize)]
struct SigningField {
    signing: Option<Signing>,
}

/// Changes the address, the types, the description or the headers of an endpoint.
pub(super) struct EditEndpoint;

impl<S: AdminStore> PageAction<S> for EditEndpoint {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let record = endpoints::find(&admin, &id).await?;
        let settings = record.settings;
        let types: Vec<String> = settings.types.into();
        let mut fields = fields(Some(settings.url.clone()), &types, settings.description);
        fields.push(FormField {
            name: "headers",
            label: "New custom headers, one a line, as Name: value (empty: they stay as they are)",
            has_lines: true,
            ..FormField::default()
        });
        let mut sentences =
            vec!["Deliveries that wait go to the new address. The secret stays.".to_owned()];
        if !settings.header_names.is_empty() {
            let names = settings.header_names.join(", ");
            sentences
                .push(format!("It has the custom headers {names}; new ones replace all of them."));
            sentences.push(
                "An address with another scheme, host or port removes them: give them again."
                    .to_owned(),
            );
        }
        Ok(Question {
            title: "Change this endpoint".to_owned(),
            subject: settings.url,
            sentences,
            fields,
            button: "Change",
            back: format!("/endpoints/{id}"),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let before = endpoints::find(&admin, &id).await?.settings.url;
        let url = form.fields.get("url").map(|url| url.trim().to_owned());
        let asked = EndpointRequest {
            // An unchanged address is not checked against the rules for receiving parties.
            url: url.filter(|url| *url != before),
            types: Patch::Set(types_of(form)),
            description: form.fields.get("description").map_or(Patch::Clear, Patch::Set),
            headers: headers_of(form)?.into(),
            ..EndpointRequest::default()
        };
        endpoints::change_by(&admin, &caller, AddressChoice::Receiver, &id, asked).await?;
        let sentence = "The endpoint is changed.".to_owned();
        Ok(ActionResult { page: format!("/endpoints/{id}"), sentence, ..ActionResult::default() })
    }
}

/// Removes an endpoint.
pub(super) struct RemoveEndpoint;

impl<S: AdminStore> PageAction<S> for RemoveEndpoint {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let record = endpoints::find(&admin, &id).await?;
        Ok(Question {
            title: "Remove this endpoint?".to_owned(),
            subject: record.settings.url,
            sentences: vec![
                "Its open deliveries are cancelled, and its secret is gone.".to_owned(),
            ],
            button: "Remove",
            is_final: true,
            back: format!("/endpoints/{id}"),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        _: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let Json(_) = endpoints::delete(State(admin), Extension(caller), PathId(id)).await?;
        let sentence = "The endpoint is removed.".to_owned();
        Ok(ActionResult { page: "/".to_owned(), sentence, ..ActionResult::default() })
    }
}

/// Holds the deliveries of an endpoint.
pub(super) struct Disable;

impl<S: AdminStore> PageAction<S> for Disable {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        DisableEndpoint::question(asked).await
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        endpoints::disable_by_receiver(&admin, &caller, &id, form.reason.clone()).await?;
        let sentence = "The endpoint is disabled.".to_owned();
        Ok(ActionResult { page: format!("/endpoints/{id}"), sentence, ..ActionResult::default() })
    }
}

/// Enables a disabled endpoint, unless the operator disabled it.
pub(super) struct Enable;

impl<S: AdminStore> PageAction<S> for Enable {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        let disabled = endpoints::find(&asked.admin, &asked.id).await?.disabled;
        let question = EnableEndpoint::question(asked).await?;
        match disabled.is_some_and(|disabled| disabled.by == DisabledBy::Operator) {
            true => Ok(Question {
                title: "Disabled by the sender: ask them to enable it".to_owned(),
                button: "",
                ..question
            }),
            false => Ok(question),
        }
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        endpoints::enable_by_receiver(&admin, &caller, &id, form.reason.clone()).await?;
        let sentence = "The endpoint is enabled.".to_owned();
        Ok(ActionResult { page: format!("/endpoints/{id}"), sentence, ..ActionResult::default() })
    }
}

/// The default and the highest rate of a plan, in deliveries per second. The attempts of one receiving party must leave
/// room for those of others.
const RATE: u32 = 10;
const RATE_MAX: u32 = 50;

/// Sends many deliveries of an endpoint again, at a bounded rate and in one plan at a time.
pub(super) struct ReplayMany;

impl<S: AdminStore> PageAction<S> for ReplayMany {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        let counts = Arc::clone(&asked.admin.portal_counts);
        let _counting = counts.try_acquire().map_err(|_| {
            Problem::limited("the server is counting other deliveries: try again", 1)
        })?;
        let question = PlanDeliveries::question(asked).await?;
        let fields = vec![rate("Deliveries a second (empty: 10, at most 50)")];
        Ok(Question { fields, ..question })
    }

    async fn act(
        ActionRequest { admin, caller, id, filters }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let rate = rate_of(form)?.unwrap_or(RATE).min(RATE_MAX);
        let (key, asked) = PlanDeliveries::request(&filters, form, Some(rate))?;
        recorded(&plans::create_alone(&admin, &caller, key, id, asked).await?)
    }
}

/// Sends one test message, at a bounded rate, and says only whether it was answered.
pub(super) struct Ping;

impl<S: AdminStore> PageAction<S> for Ping {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        PingEndpoint::question(asked).await
    }

    async fn act(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
        _: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let record = endpoints::find(&admin, &id).await?;
        if !admin.store.take_portal_ping(record.tenant, (admin.now)()).await? {
            let seconds = PORTAL_PINGS_WITHIN.as_secs();
            return Err(Problem::limited(
                &format!("at most {PORTAL_PINGS_MAX} pings in {seconds} seconds: try again later"),
                u32::try_from(seconds).unwrap_or(u32::MAX),
            ));
        }
        let asked = JsonBody(ReasonRequest::default());
        let Json(ping) = endpoints::ping(State(admin), PathId(id.clone()), asked).await?;
        let sentence = match (ping.ok, ping.status) {
            (true, Some(status)) => {
                format!("The endpoint answered HTTP {status} after {} ms.", ping.took_ms)
            }
            (_, status) => format!("The ping failed: {}.", outcome(status, false)),
        };
        Ok(ActionResult { page: format!("/endpoints/{id}"), sentence, ..ActionResult::default() })
    }
}
