{{- define "lampyris.labels" -}}
app.kubernetes.io/name: lampyris
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end }}

{{- define "lampyris.selector" -}}
app.kubernetes.io/name: lampyris
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "lampyris.image" -}}
{{ printf "%s/%s:%s" .root.Values.images.registry .name (.root.Values.images.tag | default .root.Chart.AppVersion) | quote }}
{{- end }}

{{- /* Where the node plugin and the keeper meet. */}}
{{- define "lampyris.plugin" -}}
{{ .Values.node.kubeletDir }}/plugins/csi.lampyris.dev
{{- end }}

{{- define "lampyris.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}
