//! Every label, annotation, finalizer and well-known name, once: the webhook writes them, the node
//! plugin and the tests read them, and a typo in one of the two would only show in a cluster.

/// API group of all kinds.
pub const GROUP: &str = "lampyris.dev";
/// Name of the CSI driver that publishes datasets into pods.
pub const CSI_DRIVER: &str = "csi.lampyris.dev";
/// Pod label, value `true`: this pod asks for injection.
pub const LABEL_INJECT: &str = "lampyris.dev/inject";
/// Namespace label, value `disabled`: no pod of this namespace is injected.
pub const LABEL_INJECTION: &str = "lampyris.dev/injection";
/// Label on everything that belongs to one StorageCluster, value: its name.
pub const LABEL_CLUSTER: &str = "lampyris.dev/cluster";
/// Label on pods and claims of one storage node, value: its permanent id.
pub const LABEL_NODE_ID: &str = "lampyris.dev/node-id";
/// Label on the Jobs that look at a Dataset, value: its name.
pub const LABEL_DATASET: &str = "lampyris.dev/dataset";
/// Label on the Jobs of a DatasetLoad, value: its name.
pub const LABEL_LOAD: &str = "lampyris.dev/load";
/// Label that says what a pod is: `meta`, `storage`, `inspect` or `load`.
pub const LABEL_COMPONENT: &str = "app.kubernetes.io/component";
/// Pod annotation: `name[@namespace]:/mount[:ro|rw][,…]`.
pub const ANNOTATION_DATASETS: &str = "lampyris.dev/datasets";
/// Pod annotation, value `true`: also run the scan agent.
pub const ANNOTATION_SCAN: &str = "lampyris.dev/scan";
/// Pod annotation, written by the webhook: what was injected, as JSON.
pub const ANNOTATION_INJECTED: &str = "lampyris.dev/injected";
/// Pod annotation: CPU request of each injected sidecar.
pub const ANNOTATION_CPU_REQUEST: &str = "lampyris.dev/cpu-request";
/// Pod annotation: CPU limit of each injected sidecar.
pub const ANNOTATION_CPU_LIMIT: &str = "lampyris.dev/cpu-limit";
/// Pod annotation: memory request of each injected sidecar.
pub const ANNOTATION_MEMORY_REQUEST: &str = "lampyris.dev/memory-request";
/// Pod annotation: memory limit of each injected sidecar.
pub const ANNOTATION_MEMORY_LIMIT: &str = "lampyris.dev/memory-limit";
/// Finalizer that holds a Dataset while pods use it.
pub const FINALIZER_DATASET: &str = "lampyris.dev/dataset";
/// Secret keys of S3 credentials; the last one is optional.
pub const SECRET_KEYS: [&str; 3] = ["accessKeyId", "secretAccessKey", "sessionToken"];
/// The first node id that a cluster gives out. Ids are never used twice.
pub const FIRST_NODE_ID: i64 = 10_001;
/// Port of the manager's and metadata service's RPC.
pub const META_PORT: i32 = 9000;
/// Port of the manager's admin endpoint.
pub const META_ADMIN_PORT: i32 = 9001;
/// Port of a storage node's RPC.
pub const STORAGE_PORT: i32 = 9100;
/// Port of a storage node's admin endpoint.
pub const STORAGE_ADMIN_PORT: i32 = 9101;
/// Port where a load Job shows its progress.
pub const LOAD_ADMIN_PORT: u16 = 9820;
