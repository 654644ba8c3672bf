//! Does what a plan says, in order, and stops at the first failure: the next reconcile plans anew
//! from what is then there, so a half-done plan is never resumed.

use hyper::{Method, StatusCode};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::events::{Event, EventType, Recorder};
use serde_json::{Value, json};
use thiserror::Error;

use crate::api::{self, ApiError};
use crate::http::{self, HttpError};
use crate::plan::{Action, Notice, ObjectId, Plan, lint};

/// Why a plan was not carried out.
#[derive(Debug, Error)]
pub enum ExecuteError {
    /// The plan itself is wrong: a bug of ours.
    #[error("refuse to execute: {0}")]
    Lint(String),
    /// A request to the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The manager was not reached.
    #[error("give the chain table to the manager")]
    Manager(#[from] HttpError),
    /// The manager answered, but cannot take a table at the moment.
    #[error("the manager cannot take a chain table now: HTTP status {0}")]
    Unavailable(StatusCode),
    /// The manager refused the table.
    #[error("the manager refused the chain table: {0}")]
    Refused(String),
}

/// Carries out plans under one field manager.
#[derive(Clone)]
pub struct Executor {
    client: Client,
    recorder: Recorder,
    manager: &'static str,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("manager", &self.manager).finish_non_exhaustive()
    }
}

impl Executor {
    /// Writes as field manager `manager`.
    #[must_use]
    pub fn new(client: Client, recorder: Recorder, manager: &'static str) -> Self {
        Self { client, recorder, manager }
    }

    /// Checks the plan and carries it out. `regarding` is the object that events are about.
    pub async fn execute(
        &self,
        plan: &Plan,
        regarding: &ObjectReference,
    ) -> Result<(), ExecuteError> {
        let findings = lint::lint(plan);
        if !findings.is_empty() {
            return Err(ExecuteError::Lint(findings.join("; ")));
        }
        for action in &plan.actions {
            self.act(action, regarding).await?;
        }
        Ok(())
    }

    async fn act(&self, action: &Action, regarding: &ObjectReference) -> Result<(), ExecuteError> {
        match action {
            Action::Apply(object) => self.apply(object).await?,
            Action::Create(object) => self.create(object).await?,
            Action::Delete(id) => self.delete(id).await?,
            Action::Status(id, status) => self.status(id, status).await?,
            Action::Finalizer { object, name, present } => {
                set_finalizer(&self.client, object, name, *present).await?;
            }
            Action::PushTable(host, body) => push_table(host, body).await?,
            Action::Event(notice) => self.tell(notice, regarding).await,
        }
        Ok(())
    }

    async fn apply(&self, object: &Value) -> Result<(), ApiError> {
        let id = ObjectId::of(object);
        tracing::info!(kind = id.kind, namespace = id.namespace, name = id.name, "apply");
        let params = PatchParams::apply(self.manager).force();
        api::namespaced(&self.client, &id.kind, &id.namespace)?
            .patch(&id.name, &params, &Patch::Apply(object))
            .await
            .map_err(|error| ApiError::request(format!("apply {} {}", id.kind, id.name), error))?;
        Ok(())
    }

    async fn create(&self, object: &Value) -> Result<(), ApiError> {
        let id = ObjectId::of(object);
        let typed = serde_json::from_value(object.clone())
            .map_err(|source| ApiError::Decode { what: id.name.clone(), source })?;
        let params =
            PostParams { field_manager: Some(self.manager.to_owned()), ..PostParams::default() };
        let made =
            api::namespaced(&self.client, &id.kind, &id.namespace)?.create(&params, &typed).await;
        match made {
            Ok(_) => {
                tracing::info!(kind = id.kind, namespace = id.namespace, name = id.name, "create");
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            Err(error) => Err(ApiError::request(format!("create {} {}", id.kind, id.name), error)),
        }
    }

    async fn delete(&self, id: &ObjectId) -> Result<(), ApiError> {
        tracing::info!(kind = id.kind, namespace = id.namespace, name = id.name, "delete");
        let gone = api::namespaced(&self.client, &id.kind, &id.namespace)?
            .delete(&id.name, &DeleteParams::background())
            .await;
        match gone {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(ApiError::request(format!("delete {} {}", id.kind, id.name), error)),
        }
    }

    async fn status(&self, id: &ObjectId, status: &Value) -> Result<(), ApiError> {
        tracing::info!(kind = id.kind, namespace = id.namespace, name = id.name, "status");
        let body = json!({
            "apiVersion": crate::plan::API_VERSION,
            "kind": id.kind,
            "metadata": {"name": id.name, "namespace": id.namespace},
            "status": status,
        });
        let params = PatchParams::apply(self.manager).force();
        let written = api::namespaced(&self.client, &id.kind, &id.namespace)?
            .patch_status(&id.name, &params, &Patch::Apply(&body))
            .await;
        match written {
            Ok(_) => Ok(()),
            // Deleted meanwhile: there is nobody left to tell.
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => {
                Err(ApiError::request(format!("write status of {} {}", id.kind, id.name), error))
            }
        }
    }

    /// Events are hints: one that cannot be written must not hold up the work it speaks about.
    async fn tell(&self, notice: &Notice, regarding: &ObjectReference) {
        let event = Event {
            type_: if notice.warning { EventType::Warning } else { EventType::Normal },
            reason: notice.reason.clone(),
            note: Some(notice.message.clone()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, regarding).await {
            tracing::warn!(%error, reason = notice.reason, "write an event");
        }
    }
}

/// Adds or removes one finalizer, unless someone else has changed the list meanwhile.
pub async fn set_finalizer(
    client: &Client,
    id: &ObjectId,
    name: &str,
    present: bool,
) -> Result<(), ApiError> {
    let objects = api::namespaced(client, &id.kind, &id.namespace)?;
    let doing = || format!("set finalizer of {} {}", id.kind, id.name);
    let found = objects.get_metadata_opt(&id.name).await;
    let Some(found) = found.map_err(|error| ApiError::request(doing(), error))? else {
        return Ok(());
    };
    let mut list = found.metadata.finalizers.clone().unwrap_or_default();
    if list.iter().any(|have| have == name) == present {
        return Ok(());
    }
    if present {
        list.push(name.to_owned());
    } else {
        list.retain(|have| have != name);
    }
    let patch = json!({"metadata": {
        "resourceVersion": found.metadata.resource_version,
        "finalizers": list,
    }});
    tracing::info!(kind = id.kind, namespace = id.namespace, name = id.name, present, "finalizer");
    let written = objects.patch(&id.name, &PatchParams::default(), &Patch::Merge(&patch)).await;
    match written {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(ApiError::request(doing(), error)),
    }
}

async fn push_table(host: &str, body: &Value) -> Result<(), ExecuteError> {
    tracing::info!(host, revision = %body["revision"], "push the chain table");
    let (status, answer) = http::exchange(Method::PUT, host, "/v1/table", Some(body)).await?;
    match status {
        status if status.is_success() => Ok(()),
        StatusCode::CONFLICT => {
            let reason = answer["reason"].as_str().or_else(|| answer.as_str());
            Err(ExecuteError::Refused(reason.unwrap_or("conflict").chars().take(512).collect()))
        }
        // Its store, say, for a moment: no word about this table.
        other if other.is_server_error() => Err(ExecuteError::Unavailable(other)),
        other => Err(ExecuteError::Refused(format!("HTTP status {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// What becomes of a push that a manager answers with `status`.
    async fn pushed(status: &str) -> Result<(), ExecuteError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let body = r#"{"reason":"another shape"}"#;
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let answered = async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            stream.write_all(answer.as_bytes()).await.unwrap();
        };
        let table = json!({"revision": 1});
        tokio::join!(push_table(&host, &table), answered).0
    }

    #[tokio::test]
    async fn only_an_answer_about_the_table_is_a_refusal_of_it() {
        pushed("200 OK").await.unwrap();
        for status in ["500 Internal Server Error", "503 Service Unavailable"] {
            let error = pushed(status).await.unwrap_err();
            assert!(matches!(error, ExecuteError::Unavailable(_)), "{error}");
        }
        for (status, why) in [("409 Conflict", "another shape"), ("400 Bad Request", "400")] {
            let error = pushed(status).await.unwrap_err();
            let ExecuteError::Refused(said) = &error else { panic!("{error}") };
            assert!(said.contains(why), "{said}");
        }
    }
}
