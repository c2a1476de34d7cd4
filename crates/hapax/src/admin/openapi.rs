//! The OpenAPI document, generated from the route table. The signature of a route's handler says what the
//! route reads and answers, so the document cannot name another type than the code uses.

use std::collections::BTreeMap;

use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::{Extension, Json};
use utoipa::openapi::path::{HttpMethod, Operation, OperationBuilder, Parameter, ParameterBuilder};
use utoipa::openapi::path::{ParameterIn, Paths};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{ComponentsBuilder, Object, Schema, Type};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    Content, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, Required, ResponseBuilder,
};
use utoipa::{IntoParams, ToSchema};

use super::auth::Access;
use super::extract::{IdempotencyKeyHeader, JsonBody, PathHandler, PathId, PathPair, QueryParams};
use super::pages::{
    Acted, ActionForm, File, Filters, LoggedIn, LoginForm, Page, PageReader, SeeOther,
};
use super::problem::Problem;
use super::routes::ApiRoute;
use super::{Accepted, Created, Document, Exposition, Text};
use crate::api;

/// The inputs and answers of a handler, for the document.
pub(super) struct Description {
    /// The status of a 2xx answer.
    status: &'static str,
    parameters: Vec<Parameter>,
    body: Option<(RefOr<Schema>, Required)>,
    /// The media type and the schema of a 2xx answer; `None` for an empty one.
    answer: Option<(&'static str, RefOr<Schema>)>,
    schemas: BTreeMap<String, RefOr<Schema>>,
}

impl Default for Description {
    fn default() -> Self {
        Self {
            status: "200",
            parameters: Vec::new(),
            body: None,
            answer: None,
            schemas: BTreeMap::new(),
        }
    }
}

impl Description {
    /// Adds the schema of `T` and of every type in it, and returns a reference to it.
    fn reference<T: ToSchema>(&mut self) -> RefOr<Schema> {
        let mut schemas = vec![(T::name().into_owned(), T::schema())];
        T::schemas(&mut schemas);
        self.schemas.extend(schemas);
        Ref::from_schema_name(T::name()).into()
    }
}

/// A handler that can be described. `T` is the tuple of its inputs, as in [`axum::handler::Handler`].
pub(super) trait DescribedHandler<T> {
    /// Whether the route is a page of the dashboard, which the document leaves out.
    const IS_PAGE: bool;

    fn describe() -> Description;
}

/// Something that a handler reads from a request.
pub(super) trait Input {
    fn describe(description: &mut Description);
}

/// Something that a handler answers.
pub(super) trait DescribedAnswer {
    /// Whether it is a page of the dashboard.
    const IS_PAGE: bool = false;

    fn describe(description: &mut Description);
}

macro_rules! described {
    ($($input:ident),*) => {
        impl<H, F, M, $($input),*> DescribedHandler<(M, $($input,)*)> for H
        where
            H: Fn($($input),*) -> F,
            F: Future,
            F::Output: DescribedAnswer,
            $($input: Input,)*
        {
            const IS_PAGE: bool = F::Output::IS_PAGE;

            fn describe() -> Description {
                let mut description = Description::default();
                $($input::describe(&mut description);)*
                F::Output::describe(&mut description);
                description
            }
        }
    };
}

described!();
described!(A);
described!(A, B);
described!(A, B, C);
described!(A, B, C, D);
described!(A, B, C, D, E);

impl<T> Input for State<T> {
    fn describe(_: &mut Description) {}
}

impl<T> Input for Extension<T> {
    fn describe(_: &mut Description) {}
}

impl Input for PathId {
    /// The path names the parameter.
    fn describe(_: &mut Description) {}
}

impl Input for PathPair {
    /// The path names the parameters.
    fn describe(_: &mut Description) {}
}

impl Input for PathHandler {
    /// The path names the parameters.
    fn describe(_: &mut Description) {}
}

impl Input for IdempotencyKeyHeader {
    fn describe(description: &mut Description) {
        let text = Schema::from(Object::with_type(Type::String));
        let key = ParameterBuilder::new()
            .name("Idempotency-Key")
            .parameter_in(ParameterIn::Header)
            .description(Some("The same request under the same key acts once."))
            .schema(Some(text));
        description.parameters.push(key.build());
    }
}

impl<T: IntoParams> Input for QueryParams<T> {
    fn describe(description: &mut Description) {
        description.parameters.extend(T::into_params(|| Some(ParameterIn::Query)));
    }
}

impl<T: ToSchema> Input for JsonBody<T> {
    fn describe(description: &mut Description) {
        let required = match T::schema() {
            RefOr::T(Schema::Object(object)) if !object.required.is_empty() => Required::True,
            _ => Required::False,
        };
        description.body = Some((description.reference::<T>(), required));
    }
}

impl<T: ToSchema> DescribedAnswer for Json<T> {
    fn describe(description: &mut Description) {
        description.answer = Some(("application/json", description.reference::<T>()));
    }
}

impl<T: ToSchema> DescribedAnswer for Created<T> {
    fn describe(description: &mut Description) {
        Json::<T>::describe(description);
        description.status = "201";
    }
}

impl<T: ToSchema> DescribedAnswer for Accepted<T> {
    fn describe(description: &mut Description) {
        Json::<T>::describe(description);
        description.status = "202";
    }
}

impl<T: DescribedAnswer> DescribedAnswer for Result<T, Problem> {
    const IS_PAGE: bool = T::IS_PAGE;

    fn describe(description: &mut Description) {
        T::describe(description);
    }
}

impl Input for PageReader {
    fn describe(_: &mut Description) {}
}

impl Input for OriginalUri {
    fn describe(_: &mut Description) {}
}

impl Input for ActionForm {
    fn describe(_: &mut Description) {}
}

impl Input for LoginForm {
    fn describe(_: &mut Description) {}
}

impl Input for HeaderMap {
    fn describe(_: &mut Description) {}
}

impl DescribedAnswer for LoggedIn {
    const IS_PAGE: bool = true;

    fn describe(_: &mut Description) {}
}

impl Input for Filters {
    fn describe(_: &mut Description) {}
}

impl<T> DescribedAnswer for Page<T> {
    const IS_PAGE: bool = true;

    fn describe(_: &mut Description) {}
}

impl DescribedAnswer for Acted {
    const IS_PAGE: bool = true;

    fn describe(_: &mut Description) {}
}

impl DescribedAnswer for SeeOther {
    const IS_PAGE: bool = true;

    fn describe(_: &mut Description) {}
}

impl DescribedAnswer for File {
    const IS_PAGE: bool = true;

    fn describe(_: &mut Description) {}
}

impl DescribedAnswer for StatusCode {
    fn describe(_: &mut Description) {}
}

impl DescribedAnswer for Text {
    fn describe(description: &mut Description) {
        let text = Schema::from(Object::with_type(Type::String));
        description.answer = Some(("text/plain", text.into()));
    }
}

impl DescribedAnswer for Exposition {
    fn describe(description: &mut Description) {
        Text::describe(description);
    }
}

impl DescribedAnswer for Document {
    fn describe(description: &mut Description) {
        let object = Schema::from(Object::with_type(Type::Object));
        description.answer = Some(("application/json", object.into()));
    }
}

/// The document of these routes.
pub(super) fn document<S>(routes: &[ApiRoute<S>]) -> OpenApi {
    let mut paths = Paths::new();
    let mut schemas = BTreeMap::new();
    for route in routes.iter().filter(|route| !route.is_page) {
        let mut description = (route.describe)();
        schemas.append(&mut description.schemas);
        paths.add_path_operation(
            route.path,
            vec![http_method(&route.method)],
            operation(route.path, route.access, route.summary, description),
        );
    }
    let mut problem = Description::default();
    let problem_schema = problem.reference::<api::Problem>();
    schemas.append(&mut problem.schemas);
    let problem = ResponseBuilder::new()
        .description("What is wrong, and how to fix it.")
        .content("application/problem+json", Content::new(Some(problem_schema)))
        .build();
    let components = ComponentsBuilder::new()
        .schemas_from_iter(schemas)
        .response("Problem", problem)
        .security_scheme("token", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)))
        .build();
    let info = InfoBuilder::new().title("Hapax admin API").version("1").description(Some(
        "Operates a running server. A request that changes something has a JSON body or none. Without a token, \
         such a request is refused if a page of another site sent it.",
    ));
    OpenApiBuilder::new().info(info.build()).paths(paths).components(Some(components)).build()
}

fn operation(
    path: &str,
    access: Option<Access>,
    summary: &str,
    Description { status, parameters, body, answer, .. }: Description,
) -> Operation {
    let mut answered = ResponseBuilder::new().description("The answer.");
    if let Some((media_type, schema)) = answer {
        answered = answered.content(media_type, Content::new(Some(schema)));
    }
    let mut operation = OperationBuilder::new()
        .summary(Some(summary))
        .parameters(Some(path_parameters(path).chain(parameters)))
        .response(status, answered.build())
        .response("default", Ref::from_response_name("Problem"));
    if let Some((schema, required)) = body {
        let body = RequestBodyBuilder::new()
            .content("application/json", Content::new(Some(schema)))
            .required(Some(required));
        operation = operation.request_body(Some(body.build()));
    }
    match access {
        None => operation.securities(Some([])),
        Some(access) => {
            let needs = format!(
                "Needs a token that allows {}; no token on a server that is open to local requests.",
                access.allowed_by()
            );
            operation
                .description(Some(needs))
                .securities(Some([SecurityRequirement::new("token", [access.as_str()]), SecurityRequirement::default()]))
        }
    }
    .build()
}

/// One parameter for each `{name}` in the path.
fn path_parameters(path: &str) -> impl Iterator<Item = Parameter> + '_ {
    let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let is_event = path.starts_with("/api/v1/events/");
    names.map(move |name| {
        let description = match name {
            "tenant" => "The tenant.",
            "source" => "The name of the source in the config.",
            _ if is_event => {
                "Hapax's id of the event, or the sender's id if only one event has it."
            }
            _ => "The id.",
        };
        ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .description(Some(description))
            .schema(Some(Object::with_type(Type::String)))
            .build()
    })
}

fn http_method(method: &Method) -> HttpMethod {
    match *method {
        Method::GET => HttpMethod::Get,
        Method::POST => HttpMethod::Post,
        Method::PUT => HttpMethod::Put,
        Method::PATCH => HttpMethod::Patch,
        Method::DELETE => HttpMethod::Delete,
        _ => unreachable!("the route table has no other method"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use hapax_store::MemoryStore;

    use super::super::routes::routes;
    use super::*;

    /// The committed document, for readers and generators of clients.
    const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");

    #[test]
    fn the_committed_openapi_document_is_the_generated_one() {
        // If a field or a route changed without the document, every generated client would be wrong.
        let generated = document(&routes::<MemoryStore>()).to_pretty_json().unwrap() + "\n";
        if std::env::var_os("HAPAX_WRITE_OPENAPI").is_some() {
            std::fs::write(FILE, &generated).unwrap();
        }
        let committed = std::fs::read_to_string(Path::new(FILE)).unwrap_or_default();
        assert!(
            committed == generated,
            "docs/openapi.json differs from the routes and types of the API. If the change is intended, run\n    \
             HAPAX_WRITE_OPENAPI=1 cargo test -p hapax --bin hapax openapi"
        );
    }

    #[test]
    fn every_reference_in_the_openapi_document_leads_somewhere() {
        // If a schema were missing, the document would still serialise, but every client generator
        // would fail.
        let document = serde_json::to_value(document(&routes::<MemoryStore>())).unwrap();
        let text = document.to_string();
        let references: Vec<&str> =
            text.split("\"$ref\":\"#").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert!(references.len() > 50, "{references:?}");
        for reference in references {
            assert!(document.pointer(reference).is_some(), "{reference}");
        }
    }
}
