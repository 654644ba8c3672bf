//! csi-sanity's identity and node tests against the real binary. `CSI-SANITY.md` lists the skips.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Ends a process with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sanity() -> PathBuf {
    let given = std::env::var_os("LAMPYRIS_CACHE").filter(|cache| !cache.is_empty());
    let home = || Path::new(&std::env::var("HOME").unwrap()).join(".cache/lampyris");
    let path = given.map_or_else(home, PathBuf::from).join("k8s/bin/csi-sanity");
    assert!(
        path.exists(),
        "{} is missing; get it with: GOBIN={} go install \
         github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@v5.6.0",
        path.display(),
        path.parent().unwrap().display()
    );
    path
}

#[test]
fn csi_sanity_passes() {
    let sanity = sanity();
    let kubelet = tempfile::tempdir().unwrap();
    let plugin_dir = kubelet.path().join("plugins/csi.lampyris.dev");
    let keeper = keeper::server::Server::bind(&plugin_dir.join("keeper.sock"), 0).unwrap();
    std::thread::spawn(move || keeper.run());
    let node = Command::new(env!("CARGO_BIN_EXE_lampyris-node"))
        .args(["serve", "--node-name", "node-1", "--admin", "127.0.0.1:0", "--offline"])
        .arg("--kubelet-dir")
        .arg(kubelet.path())
        .spawn()
        .unwrap();
    let _node = Running(node);
    let endpoint = plugin_dir.join("csi.sock");
    let deadline = Instant::now() + Duration::from_secs(20);
    while std::os::unix::net::UnixStream::connect(&endpoint).is_err() {
        assert!(Instant::now() < deadline, "the node plugin does not serve");
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = Command::new(sanity)
        .arg(format!("--csi.endpoint={}", endpoint.display()))
        .arg(format!("--csi.mountdir={}/mount", kubelet.path().display()))
        .arg(format!("--csi.stagingdir={}/staging", kubelet.path().display()))
        .args(["--ginkgo.no-color", "--ginkgo.focus=Identity|Node Service"])
        // It wants a volume made by a controller; CSI-SANITY.md names the test that does the same.
        .arg("--ginkgo.skip=NodeUnpublishVolume should remove target path")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    let passed = said.split(" Passed").next().and_then(|text| text.rsplit(' ').next());
    let passed: u32 =
        passed.and_then(|count| count.trim_start_matches("\u{1b}[1m").parse().ok()).unwrap_or(0);
    assert!(passed >= 10, "only {passed} tests ran: {said}");
}
