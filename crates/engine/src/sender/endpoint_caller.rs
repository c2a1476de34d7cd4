//! One attempt: opens the endpoint's sealed values, signs the stored bytes as Standard Webhooks requires,
//! and posts them once.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::delivery::idempotency_key;
use hapax_core::endpoint::{AddressChoice, EndpointSealed};
use hapax_core::endpoint_secret::EndpointSecrets;
use hapax_core::message::{Payload, thin_envelope};
use hapax_core::store::{AttemptVerdict, DeliveryClaim, DeliveryTarget};
use hapax_core::vault::{KeyId, SealContext, Vault};
use hapax_core::{Timestamp, failpoint};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

use super::verdict;
use crate::ingress::Now;
use crate::outbound::{
    CustomHeaders, EndpointClient, EndpointUrl, ParsedUrls, SendErrorClass, UrlProblem,
};

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Signs and posts. The only holder of the client for endpoints and of the vault that opens their secrets.
#[derive(Debug)]
pub struct EndpointCaller {
    client: EndpointClient,
    /// For endpoints whose address the receiving party chose.
    strict_client: EndpointClient,
    vault: Arc<Vault>,
    urls: Arc<ParsedUrls>,
}

/// The result of a ping.
#[derive(Debug, Clone)]
pub struct Ping {
    /// The endpoint's answer, or why there is none.
    pub verdict: AttemptVerdict,
    /// How long it took.
    pub took: Duration,
}

/// How one attempt went.
#[derive(Debug)]
pub(super) struct Attempt {
    /// The verdict that the store records for the delivery.
    pub(super) verdict: AttemptVerdict,
    /// How long it took.
    pub(super) took: Duration,
    /// Whether its deadline passed.
    pub(super) is_timeout: bool,
}

impl Attempt {
    /// An attempt that was not made.
    pub(super) fn given_back() -> Self {
        Self { verdict: AttemptVerdict::GivenBack, took: Duration::ZERO, is_timeout: false }
    }
}

impl EndpointCaller {
    /// Sends through `client`, with the secrets that `vault` opens. Endpoints whose address the receiving party
    /// chose are called through a client of their own, under the strictest rules.
    pub fn new(client: EndpointClient, vault: Arc<Vault>) -> Self {
        Self { strict_client: client.strictest(), client, vault, urls: Arc::default() }
    }

    /// The same client with another vault: open connections stay in use.
    pub fn with_vault(&self, vault: Arc<Vault>) -> Self {
        let (client, strict_client) = (self.client.clone(), self.strict_client.clone());
        Self { client, strict_client, vault, urls: Arc::clone(&self.urls) }
    }

    /// Reads the URL of an endpoint and checks its address, as far as the address can be known now.
    pub async fn check(&self, url: &str, by: AddressChoice) -> Result<EndpointUrl, UrlProblem> {
        let client = self.client_for(by);
        let url = EndpointUrl::parse(url, client.rules())?;
        client.check(&url).await?;
        Ok(url)
    }

    fn client_for(&self, by: AddressChoice) -> &EndpointClient {
        match by {
            AddressChoice::Operator => &self.client,
            AddressChoice::Receiver => &self.strict_client,
        }
    }

    /// The keys of the vault: endpoints under other keys cannot be sent to.
    pub fn vault_keys(&self) -> impl Iterator<Item = KeyId> + '_ {
        self.vault.key_ids()
    }

    /// Makes one attempt. Every outcome is a verdict; nothing is repeated.
    pub(super) async fn attempt(&self, claim: &DeliveryClaim, now: &Now) -> Attempt {
        let body = match claim.endpoint.payload {
            Payload::Fat => claim.body.clone(),
            // A message that was published before the endpoint wanted thin payloads is stored with
            // all of its data, so it is made thin here.
            Payload::Thin => thin_envelope(&claim.body).map_or(claim.body.clone(), Bytes::from),
        };
        self.post(&claim.endpoint, &claim.message, body, now).await
    }

    /// Sends a signed test message once and waits for the answer. A test message is not a delivery: nothing
    /// is recorded or retried.
    pub async fn ping(&self, target: &DeliveryTarget, id: &str, now: &Now) -> Ping {
        let body = format!(
            "{{\"id\":\"{id}\",\"type\":\"hapax.ping\",\"created_at\":\"{}\",\"api_version\":null,\"data\":{{}}}}",
            now()
        );
        let Attempt { verdict, took, .. } = self.post(target, id, Bytes::from(body), now).await;
        Ping { verdict, took }
    }

    async fn post(
        &self,
        target: &DeliveryTarget,
        message: &str,
        body: Bytes,
        now: &Now,
    ) -> Attempt {
        let began = Instant::now();
        let (url, headers) = match self.request(target, message, &body, now()) {
            Ok(request) => request,
            Err(reason) => {
                let verdict = verdict::of_unsendable(reason);
                return Attempt { verdict, took: began.elapsed(), is_timeout: false };
            }
        };
        let client = self.client_for(target.address_by);
        let answered = client.post(&url, headers, body, target.timeout).await;
        failpoint!("sender.posted");
        let verdict = match &answered {
            Ok(answered) => verdict::of_answer(answered, now()),
            Err(error) => verdict::of_error(error),
        };
        let is_timeout =
            answered.as_ref().is_err_and(|error| error.class == SendErrorClass::Timeout);
        Attempt { verdict, took: began.elapsed(), is_timeout }
    }

    /// The address and the headers of one attempt at `now`, or why they cannot be made.
    fn request(
        &self,
        target: &DeliveryTarget,
        message: &str,
        body: &[u8],
        now: Timestamp,
    ) -> Result<(EndpointUrl, HeaderMap), String> {
        let url = self
            .urls
            .get(&target.url)
            .map_err(|error| format!("the stored address cannot be used: {error}"))?;
        let id = target.id.to_string();
        let EndpointSealed { secrets, headers: custom } = &target.sealed;
        let context = SealContext::endpoint_secrets(&target.tenant, &id);
        let unreadable = |error| format!("the secrets of the endpoint cannot be read: {error}");
        let opened =
            self.vault.open(&context, secrets).map_err(|error| unreadable(error.to_string()))?;
        let secrets =
            EndpointSecrets::from_bytes(&opened).map_err(|error| unreadable(error.to_string()))?;
        let mut headers = HeaderMap::with_capacity(8);
        let value = |text: String| {
            HeaderValue::try_from(text).map_err(|_| "the message id cannot be a header".to_owned())
        };
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(WEBHOOK_ID, value(message.to_owned())?);
        headers.insert(WEBHOOK_TIMESTAMP, HeaderValue::from(now.as_second()));
        headers.insert(WEBHOOK_SIGNATURE, secrets.sign(message, now, body));
        headers.insert(IDEMPOTENCY_KEY, value(idempotency_key(message, target.id))?);
        if let Some(sealed) = custom {
            self.custom_headers(target, &id, sealed)?.add_to(&mut headers);
        }
        Ok((url, headers))
    }

    fn custom_headers(
        &self,
        target: &DeliveryTarget,
        id: &str,
        sealed: &hapax_core::vault::Sealed,
    ) -> Result<CustomHeaders, String> {
        let context = SealContext::endpoint_headers(&target.tenant, id);
        let unreadable =
            |error: String| format!("the headers of the endpoint cannot be read: {error}");
        let opened =
            self.vault.open(&context, sealed).map_err(|error| unreadable(error.to_string()))?;
        let pairs: Vec<(String, String)> =
            serde_json::from_slice(&opened).map_err(|_| unreadable("unknown form".to_owned()))?;
        CustomHeaders::parse(pairs.iter().map(|(name, value)| (&**name, &**value)))
            .map_err(|error| unreadable(error.to_string()))
    }
}
