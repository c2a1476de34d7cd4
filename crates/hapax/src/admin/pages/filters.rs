//! The fields of forms: of filters, which are part of the URL of a page, and of forms that are posted.

use std::sync::LazyLock;

use aws_lc_rs::{hmac, rand};
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::Uri;
use axum::http::request::Parts;
use hapax_core::limits::FORM_READ_WITHIN;
use serde::de::DeserializeOwned;
use url::form_urlencoded;

use super::super::extract::QueryParams;
use super::super::problem::Problem;

/// Signs sentences about actions. Each process has its own key, so the sentences are not shown by
/// another node or after a restart.
static DONE_KEY: LazyLock<hmac::Key> = LazyLock::new(|| {
    hmac::Key::generate(hmac::HMAC_SHA256, &rand::SystemRandom::new())
        .expect("the system has random bytes")
});

/// The fields of a filter form. A form sends its empty fields too; these count as absent.
#[derive(Clone, Default)]
pub(in crate::admin) struct Filters(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Filters {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(Self::of(&parts.uri))
    }
}

impl Filters {
    /// The fields in the query of a URI.
    pub(in crate::admin) fn of(uri: &Uri) -> Self {
        Self::parse(uri.query().unwrap_or_default().as_bytes())
    }

    fn parse(encoded: &[u8]) -> Self {
        let fields = form_urlencoded::parse(encoded).into_owned();
        Self(fields.filter(|(_, value)| !value.is_empty()).collect())
    }

    /// The value of a field.
    pub(in crate::admin) fn get(&self, name: &str) -> Option<String> {
        self.0.iter().find(|(field, _)| field == name).map(|(_, value)| value.clone())
    }

    /// The same filter with another value of one field.
    pub(in crate::admin) fn with(&self, name: &str, value: &str) -> Self {
        let mut fields: Vec<_> =
            self.0.iter().filter(|(field, _)| field != name).cloned().collect();
        fields.push((name.to_owned(), value.to_owned()));
        Self(fields)
    }

    /// Only the fields with these names.
    pub(in crate::admin) fn only(&self, names: &[&str]) -> Self {
        let is_one = |(field, _): &&(String, String)| names.contains(&field.as_str());
        Self(self.0.iter().filter(is_one).cloned().collect())
    }

    /// Whether no field has a value.
    pub(in crate::admin) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The fields in words: `source stripe, status dead`.
    pub(in crate::admin) fn described(&self) -> String {
        let words: Vec<_> = self.0.iter().map(|(name, value)| format!("{name} {value}")).collect();
        words.join(", ")
    }

    /// The same filter with a sentence about an action that was carried out. The sentence is signed, so that
    /// an address from elsewhere cannot show text of its own on a page.
    pub(in crate::admin) fn with_done(&self, sentence: &str) -> Self {
        let tag = hmac::sign(&DONE_KEY, sentence.as_bytes());
        self.with("done", sentence).with("tag", &hex::encode(tag.as_ref()))
    }

    /// The sentence about an action, if this process signed it.
    pub(in crate::admin) fn done(&self) -> Option<String> {
        let (sentence, tag) = (self.get("done")?, hex::decode(self.get("tag")?).ok()?);
        hmac::verify(&DONE_KEY, sentence.as_bytes(), &tag).ok().map(|()| sentence)
    }

    /// The link to `path` with this filter.
    pub(in crate::admin) fn link(&self, path: &str) -> String {
        format!("{path}?{}", self.encoded())
    }

    /// The link to the next page of a list.
    pub(in crate::admin) fn older(
        &self,
        base: &str,
        path: &str,
        next: Option<&str>,
    ) -> Option<String> {
        next.map(|next| format!("{base}{}", self.with("cursor", next).link(path)))
    }

    /// The fields as the query type of an API route.
    pub(in crate::admin) fn query<T: DeserializeOwned>(&self) -> Result<QueryParams<T>, Problem> {
        let uri: Uri = self
            .link("/")
            .parse()
            .map_err(|_| Problem::bad_request("the query of the page is not valid"))?;
        match Query::try_from_uri(&uri) {
            Ok(Query(query)) => Ok(QueryParams(query)),
            Err(error) => Err(QueryParams::<T>::problem(&error)),
        }
    }

    fn encoded(&self) -> String {
        form_urlencoded::Serializer::new(String::new()).extend_pairs(&self.0).finish()
    }
}

/// The body of a form with at most this many bytes, and its fields. The body must arrive within
/// [`FORM_READ_WITHIN`].
pub(in crate::admin) async fn form<S: Send + Sync>(
    request: Request,
    state: &S,
    bytes_max: usize,
) -> Result<(Bytes, Filters), Problem> {
    let read = tokio::time::timeout(FORM_READ_WITHIN, Bytes::from_request(request, state)).await;
    let bytes = read.map_err(|_| Problem::too_slow())?.map_err(|_| Problem::too_large())?;
    if bytes.len() > bytes_max {
        return Err(Problem::too_large());
    }
    let fields = Filters::parse(&bytes);
    // PostgreSQL cannot store a NUL as text.
    if fields.0.iter().any(|(_, value)| value.contains('\0')) {
        return Err(Problem::bad_request("a field must not contain a NUL character"));
    }
    Ok((bytes, fields))
}
