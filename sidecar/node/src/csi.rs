//! The part of the Container Storage Interface v1 and of kubelet's plugin registration that we speak,
//! declared by hand.
//!
//! Only messages and fields that we read or write are here; protobuf skips the rest. Names and numbers
//! are those of the public `csi.proto` 1.9 and `pluginregistration/v1`. The services dispatch by path,
//! as generated code would, and answer UNIMPLEMENTED to every other call.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use prost::Message;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

/// A message without fields that matter.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Empty {}

/// `GetPluginInfoResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct PluginInfo {
    /// Driver name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Our version.
    #[prost(string, tag = "2")]
    pub vendor_version: String,
}

/// `GetPluginCapabilitiesResponse`: none, for there is no controller service.
pub type PluginCapabilities = Empty;

/// `ProbeResponse`.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Probe {
    /// Whether calls are served; absent means yes.
    #[prost(message, optional, tag = "1")]
    pub ready: Option<Bool>,
}

/// `google.protobuf.BoolValue`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Bool {
    /// The value.
    #[prost(bool, tag = "1")]
    pub value: bool,
}

/// `NodeGetInfoResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct NodeInfo {
    /// Name of the node.
    #[prost(string, tag = "1")]
    pub node_id: String,
}

/// `NodeGetCapabilitiesResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct NodeCapabilities {
    /// What the node service can do besides publishing.
    #[prost(message, repeated, tag = "1")]
    pub capabilities: Vec<NodeCapability>,
}

/// `NodeServiceCapability`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NodeCapability {
    /// An RPC, the only kind there is.
    #[prost(message, optional, tag = "1")]
    pub rpc: Option<NodeRpc>,
}

/// `NodeServiceCapability.RPC`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NodeRpc {
    /// Which; see [`VOLUME_MOUNT_GROUP`].
    #[prost(int32, tag = "1")]
    pub kind: i32,
}

/// The capability by which kubelet tells us the pod's fsGroup instead of changing owners itself.
pub const VOLUME_MOUNT_GROUP: i32 = 6;

/// `VolumeCapability`.
#[derive(Clone, PartialEq, Message)]
pub struct VolumeCapability {
    /// Raw block access, which we refuse.
    #[prost(message, optional, tag = "1")]
    pub block: Option<Empty>,
    /// Access by a mount.
    #[prost(message, optional, tag = "2")]
    pub mount: Option<MountVolume>,
}

/// `VolumeCapability.MountVolume`.
#[derive(Clone, PartialEq, Message)]
pub struct MountVolume {
    /// The pod's fsGroup, as a number.
    #[prost(string, tag = "3")]
    pub volume_mount_group: String,
}

/// `NodePublishVolumeRequest`. It has no `Debug`: the secrets must not reach a log.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct NodePublish {
    /// `csi-<hash>` made by kubelet.
    #[prost(string, tag = "1")]
    pub volume_id: String,
    /// Where the mount has to appear.
    #[prost(string, tag = "4")]
    pub target_path: String,
    /// How the pod will use it.
    #[prost(message, optional, tag = "5")]
    pub volume_capability: Option<VolumeCapability>,
    /// Whether the pod asked for a read-only mount.
    #[prost(bool, tag = "6")]
    pub readonly: bool,
    /// What the Secret named by `nodePublishSecretRef` holds.
    #[prost(map = "string, string", tag = "7")]
    pub secrets: HashMap<String, String>,
    /// The volume's attributes, and the pod's identity from kubelet.
    #[prost(map = "string, string", tag = "8")]
    pub volume_context: HashMap<String, String>,
}

impl std::fmt::Debug for NodePublish {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodePublish")
            .field("volume_id", &self.volume_id)
            .field("target_path", &self.target_path)
            .field("volume_context", &self.volume_context)
            .finish_non_exhaustive()
    }
}

/// `NodeUnpublishVolumeRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NodeUnpublish {
    /// As in [`NodePublish`].
    #[prost(string, tag = "1")]
    pub volume_id: String,
    /// As in [`NodePublish`].
    #[prost(string, tag = "2")]
    pub target_path: String,
}

/// `pluginregistration.PluginInfo`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Registration {
    /// `CSIPlugin`.
    #[prost(string, tag = "1")]
    pub kind: String,
    /// Driver name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Path of the CSI socket.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// Versions of CSI that we speak.
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// `pluginregistration.RegistrationStatus`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegistrationStatus {
    /// Whether kubelet took us.
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    /// Why not.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A boxed answer.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Status>> + Send>>;

/// What the driver does; the services below call it.
pub trait Driver: Send + Sync + 'static {
    /// Name of the node.
    fn node_name(&self) -> String;
    /// Path of the CSI socket as kubelet sees it.
    fn endpoint(&self) -> String;
    /// Whether calls can be served.
    fn is_ready(&self) -> bool;
    /// Mounts a volume.
    fn publish(self: Arc<Self>, request: NodePublish) -> Answer<()>;
    /// Unmounts a volume.
    fn unpublish(self: Arc<Self>, request: NodeUnpublish) -> Answer<()>;
    /// Kubelet's verdict on our registration.
    fn registered(&self, status: &RegistrationStatus);
}

/// Name of the driver.
pub const DRIVER_NAME: &str = "csi.lampyris.dev";

type Answered = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

/// One unary call from a function.
struct Call<F>(F);

impl<F, I, O> UnaryService<I> for Call<F>
where
    F: FnOnce(I) -> Answer<O> + Clone,
    O: Send + 'static,
{
    type Response = O;
    type Future = Pin<Box<dyn Future<Output = Result<Response<O>, Status>> + Send>>;

    fn call(&mut self, request: Request<I>) -> Self::Future {
        let answer = (self.0.clone())(request.into_inner());
        Box::pin(async move { answer.await.map(Response::new) })
    }
}

fn unary<I, O, F>(request: http::Request<Body>, call: F) -> Answered
where
    I: Message + Default + Send + 'static,
    O: Message + Default + Send + 'static,
    F: FnOnce(I) -> Answer<O> + Clone + Send + 'static,
{
    Box::pin(async move {
        let mut grpc = Grpc::new(ProstCodec::<O, I>::default());
        Ok(grpc.unary(Call(call), request).await)
    })
}

fn ready<T: Send + 'static>(value: T) -> Answer<T> {
    Box::pin(std::future::ready(Ok(value)))
}

fn unimplemented(request: &http::Request<Body>) -> Answered {
    let status = Status::unimplemented(format!("{} is not served", request.uri().path()));
    Box::pin(async move { Ok(status.into_http()) })
}

macro_rules! service {
    ($(#[$doc:meta])* $type:ident, $name:literal, $route:ident) => {
        $(#[$doc])*
        pub struct $type<D>(pub Arc<D>);

        impl<D> Clone for $type<D> {
            fn clone(&self) -> Self {
                Self(Arc::clone(&self.0))
            }
        }

        impl<D> std::fmt::Debug for $type<D> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($name)
            }
        }

        impl<D> NamedService for $type<D> {
            const NAME: &'static str = $name;
        }

        impl<D: Driver> Service<http::Request<Body>> for $type<D> {
            type Response = http::Response<Body>;
            type Error = Infallible;
            type Future = Answered;

            fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
                Poll::Ready(Ok(()))
            }

            fn call(&mut self, request: http::Request<Body>) -> Answered {
                $route(&self.0, request)
            }
        }
    };
}

service!(
    /// `csi.v1.Identity`.
    Identity, "csi.v1.Identity", identity
);
service!(
    /// `csi.v1.Node`.
    Node, "csi.v1.Node", node
);
service!(
    /// `pluginregistration.Registration`.
    Registrar, "pluginregistration.Registration", registrar
);

fn identity<D: Driver>(driver: &Arc<D>, request: http::Request<Body>) -> Answered {
    match request.uri().path() {
        "/csi.v1.Identity/GetPluginInfo" => unary(request, |_: Empty| {
            ready(PluginInfo {
                name: DRIVER_NAME.to_owned(),
                vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            })
        }),
        "/csi.v1.Identity/GetPluginCapabilities" => {
            unary(request, |_: Empty| ready(PluginCapabilities {}))
        }
        "/csi.v1.Identity/Probe" => {
            let value = driver.is_ready();
            unary(request, move |_: Empty| ready(Probe { ready: Some(Bool { value }) }))
        }
        _ => unimplemented(&request),
    }
}

fn node<D: Driver>(driver: &Arc<D>, request: http::Request<Body>) -> Answered {
    let driver = Arc::clone(driver);
    match request.uri().path() {
        "/csi.v1.Node/NodeGetInfo" => {
            let node_id = driver.node_name();
            unary(request, |_: Empty| ready(NodeInfo { node_id }))
        }
        "/csi.v1.Node/NodeGetCapabilities" => unary(request, |_: Empty| {
            let rpc = Some(NodeRpc { kind: VOLUME_MOUNT_GROUP });
            ready(NodeCapabilities { capabilities: vec![NodeCapability { rpc }] })
        }),
        "/csi.v1.Node/NodePublishVolume" => unary(request, move |request: NodePublish| {
            let answer = driver.publish(request);
            Box::pin(async move { answer.await.map(|()| Empty {}) })
        }),
        "/csi.v1.Node/NodeUnpublishVolume" => unary(request, move |request: NodeUnpublish| {
            let answer = driver.unpublish(request);
            Box::pin(async move { answer.await.map(|()| Empty {}) })
        }),
        _ => unimplemented(&request),
    }
}

fn registrar<D: Driver>(driver: &Arc<D>, request: http::Request<Body>) -> Answered {
    let driver = Arc::clone(driver);
    match request.uri().path() {
        "/pluginregistration.Registration/GetInfo" => {
            let endpoint = driver.endpoint();
            unary(request, |_: Empty| {
                ready(Registration {
                    kind: "CSIPlugin".to_owned(),
                    name: DRIVER_NAME.to_owned(),
                    endpoint,
                    supported_versions: vec!["1.0.0".to_owned()],
                })
            })
        }
        "/pluginregistration.Registration/NotifyRegistrationStatus" => {
            unary(request, move |status: RegistrationStatus| {
                driver.registered(&status);
                ready(Empty {})
            })
        }
        _ => unimplemented(&request),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_publish_request_has_the_field_numbers_of_csi() {
        // volume_id = 1, target_path = 4, capability = 5 {mount = 2 {group = 3}}, readonly = 6,
        // secrets = 7, volume_context = 8; staging_target_path = 3 is skipped.
        let bytes = b"\x0a\x01v\x1a\x01s\x22\x01t\x2a\x05\x12\x03\x1a\x017\x30\x01\
                      \x3a\x06\x0a\x01k\x12\x01s\x42\x06\x0a\x01a\x12\x01b";
        let request = NodePublish::decode(&bytes[..]).unwrap();
        assert_eq!(request.volume_id, "v");
        assert_eq!(request.target_path, "t");
        let capability = request.volume_capability.as_ref().unwrap();
        assert_eq!(capability.mount.as_ref().unwrap().volume_mount_group, "7");
        assert!(capability.block.is_none());
        assert!(request.readonly);
        assert_eq!(request.secrets["k"], "s");
        assert_eq!(request.volume_context["a"], "b");
        assert!(!format!("{request:?}").contains("secrets"));
    }
}
