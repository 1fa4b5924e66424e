	.file	"TVMMod"
	.text
	.globl	__tvm_ffi_main
	.p2align	4
	.type	__tvm_ffi_main,@function
__tvm_ffi_main:
.Lfunc_begin0:
	.file	1 "." "IRModule.CodeGenLLVM"
	.loc	1 0 0
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%r13
	.cfi_def_cfa_offset 40
	pushq	%r12
	.cfi_def_cfa_offset 48
	pushq	%rbx
	.cfi_def_cfa_offset 56
	subq	$56, %rsp
	.cfi_def_cfa_offset 112
	.cfi_offset %rbx, -56
	.cfi_offset %r12, -48
	.cfi_offset %r13, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
	cmpl	$6, %edx
	jne	.LBB0_119
.Ltmp0:
	testq	%rsi, %rsi
	je	.LBB0_120
.Ltmp1:
	movl	(%rsi), %eax
.Ltmp2:
	cmpl	$63, %eax
	jle	.LBB0_7
.Ltmp3:
	cmpl	$70, %eax
	jne	.LBB0_9
.Ltmp4:
	movq	8(%rsi), %rax
.Ltmp5:
	addq	$24, %rax
	movl	16(%rsi), %ecx
.Ltmp6:
	cmpl	$63, %ecx
	jg	.LBB0_10
.Ltmp7:
.LBB0_5:
	cmpl	$7, %ecx
	ja	.LBB0_113
.Ltmp8:
	movl	$145, %edx
.Ltmp9:
	btl	%ecx, %edx
	jb	.LBB0_14
	jmp	.LBB0_113
.Ltmp10:
.LBB0_7:
	cmpl	$7, %eax
	ja	.LBB0_112
.Ltmp11:
	movl	$145, %ecx
.Ltmp12:
	btl	%eax, %ecx
	jae	.LBB0_112
.Ltmp13:
.LBB0_9:
	movq	8(%rsi), %rax
.Ltmp14:
	movl	16(%rsi), %ecx
.Ltmp15:
	cmpl	$63, %ecx
	jle	.LBB0_5
.Ltmp16:
.LBB0_10:
	cmpl	$70, %ecx
	jne	.LBB0_14
.Ltmp17:
	movq	24(%rsi), %r10
	addq	$24, %r10
	movl	32(%rsi), %ecx
.Ltmp18:
	cmpl	$63, %ecx
	jg	.LBB0_15
.Ltmp19:
.LBB0_12:
	cmpl	$7, %ecx
	ja	.LBB0_114
.Ltmp20:
	movl	$145, %edx
	btl	%ecx, %edx
	jb	.LBB0_19
	jmp	.LBB0_114
.Ltmp21:
.LBB0_14:
	movq	24(%rsi), %r10
	movl	32(%rsi), %ecx
.Ltmp22:
	cmpl	$63, %ecx
	jle	.LBB0_12
.Ltmp23:
.LBB0_15:
	cmpl	$70, %ecx
	jne	.LBB0_19
.Ltmp24:
	movq	40(%rsi), %r11
	addq	$24, %r11
	movl	48(%rsi), %ecx
.Ltmp25:
	cmpl	$63, %ecx
	jg	.LBB0_20
.Ltmp26:
.LBB0_17:
	cmpl	$7, %ecx
	ja	.LBB0_115
.Ltmp27:
	movl	$145, %edx
	btl	%ecx, %edx
	jb	.LBB0_24
	jmp	.LBB0_115
.Ltmp28:
.LBB0_19:
	movq	40(%rsi), %r11
	movl	48(%rsi), %ecx
.Ltmp29:
	cmpl	$63, %ecx
	jle	.LBB0_17
.Ltmp30:
.LBB0_20:
	cmpl	$70, %ecx
	jne	.LBB0_24
.Ltmp31:
	movq	56(%rsi), %rbx
	addq	$24, %rbx
	movl	64(%rsi), %ecx
.Ltmp32:
	cmpl	$63, %ecx
	jg	.LBB0_25
.Ltmp33:
.LBB0_22:
	cmpl	$7, %ecx
	ja	.LBB0_116
.Ltmp34:
	movl	$145, %edx
	btl	%ecx, %edx
	jb	.LBB0_29
	jmp	.LBB0_116
.Ltmp35:
.LBB0_24:
	movq	56(%rsi), %rbx
	movl	64(%rsi), %ecx
.Ltmp36:
	cmpl	$63, %ecx
	jle	.LBB0_22
.Ltmp37:
.LBB0_25:
	cmpl	$70, %ecx
	jne	.LBB0_29
.Ltmp38:
	movq	72(%rsi), %r14
	addq	$24, %r14
	movl	80(%rsi), %ecx
.Ltmp39:
	cmpl	$63, %ecx
	jg	.LBB0_30
.Ltmp40:
.LBB0_27:
	cmpl	$7, %ecx
	ja	.LBB0_117
.Ltmp41:
	movl	$145, %edx
	btl	%ecx, %edx
	jb	.LBB0_32
	jmp	.LBB0_117
.Ltmp42:
.LBB0_29:
	movq	72(%rsi), %r14
	movl	80(%rsi), %ecx
.Ltmp43:
	cmpl	$63, %ecx
	jle	.LBB0_27
.Ltmp44:
.LBB0_30:
	cmpl	$70, %ecx
	jne	.LBB0_32
.Ltmp45:
	movq	88(%rsi), %r15
	addq	$24, %r15
	jmp	.LBB0_33
.Ltmp46:
.LBB0_32:
	movq	88(%rsi), %r15
.Ltmp47:
.LBB0_33:
	testq	%rax, %rax
	je	.LBB0_112
.Ltmp48:
	cmpl	$2, 16(%rax)
	jne	.LBB0_121
.Ltmp49:
	cmpw	$1, 22(%rax)
	jne	.LBB0_122
.Ltmp50:
	cmpb	$16, 21(%rax)
	jne	.LBB0_122
.Ltmp51:
	cmpb	$4, 20(%rax)
	jne	.LBB0_122
.Ltmp52:
	cmpl	$1, 8(%rax)
	jne	.LBB0_123
.Ltmp53:
	testq	%r10, %r10
	je	.LBB0_113
.Ltmp54:
	cmpl	$2, 16(%r10)
	jne	.LBB0_124
.Ltmp55:
	cmpw	$1, 22(%r10)
	jne	.LBB0_125
.Ltmp56:
	cmpb	$8, 21(%r10)
	jne	.LBB0_125
.Ltmp57:
	cmpb	$1, 20(%r10)
	jne	.LBB0_125
.Ltmp58:
	cmpl	$1, 8(%r10)
	jne	.LBB0_126
.Ltmp59:
	testq	%r11, %r11
	je	.LBB0_114
.Ltmp60:
	cmpl	$2, 16(%r11)
	jne	.LBB0_127
.Ltmp61:
	cmpw	$1, 22(%r11)
	jne	.LBB0_128
.Ltmp62:
	cmpb	$8, 21(%r11)
	jne	.LBB0_128
.Ltmp63:
	cmpb	$1, 20(%r11)
	jne	.LBB0_128
.Ltmp64:
	cmpl	$1, 8(%r11)
	jne	.LBB0_129
.Ltmp65:
	testq	%rbx, %rbx
	je	.LBB0_115
.Ltmp66:
	cmpl	$1, 16(%rbx)
	jne	.LBB0_130
.Ltmp67:
	cmpw	$1, 22(%rbx)
	jne	.LBB0_131
.Ltmp68:
	cmpb	$32, 21(%rbx)
	jne	.LBB0_131
.Ltmp69:
	cmpb	$2, 20(%rbx)
	jne	.LBB0_131
.Ltmp70:
	cmpl	$1, 8(%rbx)
	jne	.LBB0_132
.Ltmp71:
	testq	%r14, %r14
	je	.LBB0_116
.Ltmp72:
	cmpl	$1, 16(%r14)
	jne	.LBB0_133
.Ltmp73:
	cmpw	$1, 22(%r14)
	jne	.LBB0_134
.Ltmp74:
	cmpb	$32, 21(%r14)
	jne	.LBB0_134
.Ltmp75:
	cmpb	$2, 20(%r14)
	jne	.LBB0_134
.Ltmp76:
	cmpl	$1, 8(%r14)
	jne	.LBB0_135
.Ltmp77:
	testq	%r15, %r15
	je	.LBB0_117
.Ltmp78:
	cmpl	$2, 16(%r15)
	jne	.LBB0_136
.Ltmp79:
	cmpw	$1, 22(%r15)
	jne	.LBB0_137
.Ltmp80:
	cmpb	$16, 21(%r15)
	jne	.LBB0_137
.Ltmp81:
	cmpb	$4, 20(%r15)
	jne	.LBB0_137
.Ltmp82:
	cmpl	$1, 8(%r15)
	jne	.LBB0_138
.Ltmp83:
	movq	24(%rax), %rcx
.Ltmp84:
	movq	%rcx, 48(%rsp)
	movq	(%rcx), %rdi
.Ltmp85:
	movq	32(%rax), %r9
.Ltmp86:
	movl	12(%rax), %esi
.Ltmp87:
	movq	24(%r10), %rcx
.Ltmp88:
	movq	%rcx, 40(%rsp)
	movq	32(%r10), %rcx
.Ltmp89:
	movq	24(%r11), %rdx
.Ltmp90:
	movq	%rdx, 32(%rsp)
	movq	32(%r11), %r8
.Ltmp91:
	movq	24(%rbx), %rdx
.Ltmp92:
	movq	%rdx, 24(%rsp)
	movq	24(%r14), %rdx
.Ltmp93:
	movq	%rdx, 16(%rsp)
	movq	32(%r14), %rbp
.Ltmp94:
	movq	24(%r15), %rdx
.Ltmp95:
	movq	%rdx, (%rsp)
	movq	32(%r15), %r13
.Ltmp96:
	testq	%r9, %r9
	je	.LBB0_72
.Ltmp97:
	cmpq	$4096, (%r9)
	sete	%dl
	cmpq	$1, %rdi
	sete	%r12b
	cmpq	$1, 8(%r9)
	jne	.LBB0_140
.Ltmp98:
	orb	%dl, %r12b
	je	.LBB0_140
.Ltmp99:
.LBB0_72:
	movq	(%rax), %rdx
	movq	%rdx, 8(%rsp)
	testq	%rdx, %rdx
	setne	%dl
	testq	%rdi, %rdi
	sete	%r9b
.Ltmp100:
	orb	%dl, %r9b
	je	.LBB0_139
.Ltmp101:
	testq	%rcx, %rcx
	je	.LBB0_76
.Ltmp102:
	cmpq	$2048, (%rcx)
	jne	.LBB0_142
.Ltmp103:
	cmpq	$1, 8(%rcx)
	jne	.LBB0_142
.Ltmp104:
.LBB0_76:
	cmpl	12(%r10), %esi
	jne	.LBB0_141
.Ltmp105:
	movq	(%r10), %rcx
.Ltmp106:
	testq	%rcx, %rcx
	je	.LBB0_143
.Ltmp107:
	testq	%r8, %r8
	je	.LBB0_81
.Ltmp108:
	cmpq	$256, (%r8)
	jne	.LBB0_145
.Ltmp109:
	cmpq	$1, 8(%r8)
	jne	.LBB0_145
.Ltmp110:
.LBB0_81:
	cmpl	12(%r11), %esi
	jne	.LBB0_144
.Ltmp111:
	movq	(%r11), %r8
.Ltmp112:
	testq	%r8, %r8
	je	.LBB0_146
.Ltmp113:
	cmpl	12(%rbx), %esi
	jne	.LBB0_147
.Ltmp114:
	movq	(%rbx), %r9
	testq	%r9, %r9
	je	.LBB0_148
.Ltmp115:
	testq	%rbp, %rbp
	je	.LBB0_87
.Ltmp116:
	cmpq	$1, (%rbp)
	jne	.LBB0_149
.Ltmp117:
.LBB0_87:
	cmpl	12(%r14), %esi
	jne	.LBB0_150
.Ltmp118:
	movq	(%r14), %rbp
.Ltmp119:
	testq	%rbp, %rbp
	je	.LBB0_151
.Ltmp120:
	movq	(%rsp), %rdx
	cmpq	(%rdx), %rdi
	jne	.LBB0_152
.Ltmp121:
	testq	%r13, %r13
	je	.LBB0_93
.Ltmp122:
	cmpq	$4096, (%r13)
	sete	%dl
	cmpq	$1, %rdi
	sete	%r12b
	cmpq	$1, 8(%r13)
	jne	.LBB0_158
.Ltmp123:
	orb	%dl, %r12b
	je	.LBB0_158
.Ltmp124:
.LBB0_93:
	cmpl	12(%r15), %esi
	jne	.LBB0_153
.Ltmp125:
	movq	(%r15), %r13
.Ltmp126:
	testq	%rdi, %rdi
	je	.LBB0_96
.Ltmp127:
	testq	%r13, %r13
	je	.LBB0_154
.Ltmp128:
.LBB0_96:
	movq	48(%rsp), %rdx
	cmpq	$4096, 8(%rdx)
	jne	.LBB0_160
.Ltmp129:
	cmpq	$0, 40(%rax)
	jne	.LBB0_162
.Ltmp130:
	movq	40(%rsp), %rax
	cmpq	$4096, (%rax)
	jne	.LBB0_165
.Ltmp131:
	cmpq	$2048, 8(%rax)
	jne	.LBB0_166
.Ltmp132:
	cmpq	$0, 40(%r10)
	jne	.LBB0_167
.Ltmp133:
	movq	32(%rsp), %rax
	cmpq	$4096, (%rax)
	jne	.LBB0_169
.Ltmp134:
	cmpq	$256, 8(%rax)
	jne	.LBB0_170
.Ltmp135:
	cmpq	$0, 40(%r11)
	jne	.LBB0_171
.Ltmp136:
	movq	24(%rsp), %rax
	cmpq	$1, (%rax)
	jne	.LBB0_173
.Ltmp137:
	cmpq	$0, 40(%rbx)
	jne	.LBB0_174
.Ltmp138:
	movq	16(%rsp), %rax
	cmpq	$4096, (%rax)
	jne	.LBB0_176
.Ltmp139:
	cmpq	$0, 40(%r14)
	jne	.LBB0_177
.Ltmp140:
	movq	(%rsp), %rax
	cmpq	$4096, 8(%rax)
	jne	.LBB0_179
.Ltmp141:
	cmpq	$0, 40(%r15)
	jne	.LBB0_180
.Ltmp142:
	movq	8(%rsp), %rdx
	pushq	%r13
.Ltmp143:
	.cfi_adjust_cfa_offset 8
	pushq	%rbp
	.cfi_adjust_cfa_offset 8
	callq	main_compute_
.Ltmp144:
	addq	$72, %rsp
	.cfi_adjust_cfa_offset -72
.Ltmp145:
.LBB0_111:
	popq	%rbx
	.cfi_def_cfa_offset 48
	popq	%r12
	.cfi_def_cfa_offset 40
	popq	%r13
	.cfi_def_cfa_offset 32
	popq	%r14
	.cfi_def_cfa_offset 24
	popq	%r15
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.Ltmp146:
.LBB0_112:
	.cfi_def_cfa_offset 112
	leaq	.L.str.11(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp147:
	leaq	.L.str.8(%rip), %rdx
	leaq	.L.str.9(%rip), %rcx
	jmp	.LBB0_118
.Ltmp148:
.LBB0_113:
	leaq	.L.str.11(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp149:
	leaq	.L.str.8(%rip), %rdx
	leaq	.L.str.12(%rip), %rcx
	jmp	.LBB0_118
.Ltmp150:
.LBB0_114:
	leaq	.L.str.11(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp151:
	leaq	.L.str.8(%rip), %rdx
	leaq	.L.str.13(%rip), %rcx
	jmp	.LBB0_118
.Ltmp152:
.LBB0_115:
	leaq	.L.str.11(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp153:
	leaq	.L.str.8(%rip), %rdx
	leaq	.L.str.14(%rip), %rcx
	jmp	.LBB0_118
.Ltmp154:
.LBB0_116:
	leaq	.L.str.11(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp155:
	leaq	.L.str.8(%rip), %rdx
	leaq	.L.str.15(%rip), %rcx
	jmp	.LBB0_118
.Ltmp156:
.LBB0_117:
	leaq	.L.str.11(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp157:
	leaq	.L.str.8(%rip), %rdx
	leaq	.L.str.16(%rip), %rcx
.Ltmp158:
.LBB0_118:
	leaq	.L.str.4(%rip), %r8
	leaq	.L.str.5(%rip), %r9
	jmp	.LBB0_156
.Ltmp159:
.LBB0_119:
	leaq	.L.str.6(%rip), %rax
	leaq	.L.str.5(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp160:
	leaq	.L.str.1(%rip), %rdx
.Ltmp161:
	leaq	.L.str.2(%rip), %rcx
.Ltmp162:
	leaq	.L.str.3(%rip), %r8
	jmp	.LBB0_155
.Ltmp163:
.LBB0_120:
	subq	$16, %rsp
	.cfi_adjust_cfa_offset 16
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%xmm0, (%rsp)
	leaq	.L.str(%rip), %rdi
.Ltmp164:
	leaq	.L.str.7(%rip), %rdx
.Ltmp165:
	leaq	.L.str.4(%rip), %rcx
.Ltmp166:
	leaq	.L.str.5(%rip), %r8
	leaq	.L.str.6(%rip), %r9
	movl	$4, %esi
.Ltmp167:
	jmp	.LBB0_157
.Ltmp168:
.LBB0_121:
	.cfi_def_cfa_offset 112
	leaq	.L.str.13(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp169:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.19(%rip), %rcx
	leaq	.L.str.20(%rip), %r8
	jmp	.LBB0_161
.Ltmp170:
.LBB0_122:
	leaq	.L.str.22(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp171:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.19(%rip), %rcx
	leaq	.L.str.21(%rip), %r8
	jmp	.LBB0_161
.Ltmp172:
.LBB0_123:
	leaq	.L.str.24(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp173:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.19(%rip), %rcx
	leaq	.L.str.23(%rip), %r8
	jmp	.LBB0_161
.Ltmp174:
.LBB0_124:
	leaq	.L.str.13(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp175:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.25(%rip), %rcx
	leaq	.L.str.20(%rip), %r8
	leaq	.L.str.12(%rip), %r9
	jmp	.LBB0_183
.Ltmp176:
.LBB0_125:
	leaq	.L.str.26(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp177:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.25(%rip), %rcx
	leaq	.L.str.21(%rip), %r8
	leaq	.L.str.12(%rip), %r9
	jmp	.LBB0_183
.Ltmp178:
.LBB0_126:
	leaq	.L.str.24(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp179:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.25(%rip), %rcx
	leaq	.L.str.23(%rip), %r8
	leaq	.L.str.12(%rip), %r9
	jmp	.LBB0_183
.Ltmp180:
.LBB0_127:
	leaq	.L.str.13(%rip), %r9
	leaq	.L.str.10(%rip), %rax
	leaq	.L.str.17(%rip), %rdi
.Ltmp181:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.27(%rip), %rcx
	leaq	.L.str.20(%rip), %r8
	jmp	.LBB0_163
.Ltmp182:
.LBB0_128:
	leaq	.L.str.26(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp183:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.27(%rip), %rcx
	leaq	.L.str.21(%rip), %r8
	leaq	.L.str.13(%rip), %r9
	jmp	.LBB0_183
.Ltmp184:
.LBB0_129:
	leaq	.L.str.24(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp185:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.27(%rip), %rcx
	leaq	.L.str.23(%rip), %r8
	leaq	.L.str.13(%rip), %r9
	jmp	.LBB0_183
.Ltmp186:
.LBB0_130:
	leaq	.L.str.12(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp187:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.28(%rip), %rcx
	leaq	.L.str.20(%rip), %r8
	leaq	.L.str.14(%rip), %r9
	jmp	.LBB0_183
.Ltmp188:
.LBB0_131:
	leaq	.L.str.29(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp189:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.28(%rip), %rcx
	leaq	.L.str.21(%rip), %r8
	leaq	.L.str.14(%rip), %r9
	jmp	.LBB0_183
.Ltmp190:
.LBB0_132:
	leaq	.L.str.24(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp191:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.28(%rip), %rcx
	leaq	.L.str.23(%rip), %r8
	leaq	.L.str.14(%rip), %r9
	jmp	.LBB0_183
.Ltmp192:
.LBB0_133:
	leaq	.L.str.12(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp193:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.30(%rip), %rcx
	leaq	.L.str.20(%rip), %r8
	leaq	.L.str.15(%rip), %r9
	jmp	.LBB0_183
.Ltmp194:
.LBB0_134:
	leaq	.L.str.29(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp195:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.30(%rip), %rcx
	leaq	.L.str.21(%rip), %r8
	leaq	.L.str.15(%rip), %r9
	jmp	.LBB0_183
.Ltmp196:
.LBB0_135:
	leaq	.L.str.24(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp197:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.30(%rip), %rcx
	leaq	.L.str.23(%rip), %r8
	leaq	.L.str.15(%rip), %r9
	jmp	.LBB0_183
.Ltmp198:
.LBB0_136:
	leaq	.L.str.13(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp199:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.31(%rip), %rcx
	leaq	.L.str.20(%rip), %r8
	jmp	.LBB0_182
.Ltmp200:
.LBB0_137:
	leaq	.L.str.22(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str(%rip), %rdi
.Ltmp201:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.31(%rip), %rcx
	leaq	.L.str.21(%rip), %r8
	jmp	.LBB0_182
.Ltmp202:
.LBB0_138:
	leaq	.L.str.24(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp203:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.31(%rip), %rcx
	leaq	.L.str.23(%rip), %r8
	jmp	.LBB0_182
.Ltmp204:
.LBB0_139:
	leaq	.L.str.35(%rip), %rax
	leaq	.L.str.5(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp205:
	leaq	.L.str.19(%rip), %rdx
	leaq	.L.str.34(%rip), %rcx
.Ltmp206:
	leaq	.L.str.9(%rip), %r8
.Ltmp207:
	jmp	.LBB0_155
.Ltmp208:
.LBB0_140:
	leaq	.L.str.33(%rip), %rax
	leaq	.L.str.17(%rip), %rdi
.Ltmp209:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.19(%rip), %rcx
.Ltmp210:
	leaq	.L.str.32(%rip), %r8
.Ltmp211:
	leaq	.L.str.9(%rip), %r9
.Ltmp212:
	jmp	.LBB0_159
.Ltmp213:
.LBB0_141:
	leaq	.L.str.39(%rip), %rax
	leaq	.L.str.38(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp214:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.36(%rip), %rcx
.Ltmp215:
	jmp	.LBB0_168
.Ltmp216:
.LBB0_142:
	leaq	.L.str.33(%rip), %rax
	leaq	.L.str.17(%rip), %rdi
.Ltmp217:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.25(%rip), %rcx
.Ltmp218:
	leaq	.L.str.32(%rip), %r8
.Ltmp219:
	leaq	.L.str.12(%rip), %r9
	jmp	.LBB0_159
.Ltmp220:
.LBB0_143:
	leaq	.L.str.35(%rip), %rax
	leaq	.L.str.5(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp221:
	leaq	.L.str.25(%rip), %rdx
	leaq	.L.str.34(%rip), %rcx
	leaq	.L.str.12(%rip), %r8
.Ltmp222:
	jmp	.LBB0_155
.Ltmp223:
.LBB0_144:
	leaq	.L.str.39(%rip), %rax
	leaq	.L.str.38(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp224:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.40(%rip), %rcx
	jmp	.LBB0_172
.Ltmp225:
.LBB0_145:
	leaq	.L.str.33(%rip), %rax
	leaq	.L.str.17(%rip), %rdi
.Ltmp226:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.27(%rip), %rcx
	leaq	.L.str.32(%rip), %r8
.Ltmp227:
	leaq	.L.str.13(%rip), %r9
	jmp	.LBB0_159
.Ltmp228:
.LBB0_146:
	leaq	.L.str.35(%rip), %rax
	leaq	.L.str.5(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp229:
	leaq	.L.str.27(%rip), %rdx
	leaq	.L.str.34(%rip), %rcx
	leaq	.L.str.13(%rip), %r8
	jmp	.LBB0_155
.Ltmp230:
.LBB0_147:
	leaq	.L.str.39(%rip), %rax
	leaq	.L.str.38(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp231:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.41(%rip), %rcx
	jmp	.LBB0_175
.Ltmp232:
.LBB0_148:
	leaq	.L.str.35(%rip), %rax
	leaq	.L.str.5(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp233:
	leaq	.L.str.28(%rip), %rdx
	leaq	.L.str.34(%rip), %rcx
	leaq	.L.str.14(%rip), %r8
	jmp	.LBB0_155
.Ltmp234:
.LBB0_149:
	leaq	.L.str.33(%rip), %rax
	leaq	.L.str.17(%rip), %rdi
.Ltmp235:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.30(%rip), %rcx
	leaq	.L.str.32(%rip), %r8
	leaq	.L.str.15(%rip), %r9
	jmp	.LBB0_159
.Ltmp236:
.LBB0_150:
	leaq	.L.str.39(%rip), %rax
	leaq	.L.str.38(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp237:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.42(%rip), %rcx
	jmp	.LBB0_178
.Ltmp238:
.LBB0_151:
	leaq	.L.str.35(%rip), %rax
	leaq	.L.str.5(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp239:
	leaq	.L.str.30(%rip), %rdx
	leaq	.L.str.34(%rip), %rcx
	leaq	.L.str.15(%rip), %r8
	jmp	.LBB0_155
.Ltmp240:
.LBB0_152:
	leaq	.L.str.44(%rip), %rax
	leaq	.L.str.38(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp241:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.43(%rip), %rcx
	jmp	.LBB0_181
.Ltmp242:
.LBB0_153:
	leaq	.L.str.39(%rip), %rax
	leaq	.L.str.38(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp243:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.45(%rip), %rcx
	jmp	.LBB0_181
.Ltmp244:
.LBB0_154:
	leaq	.L.str.35(%rip), %rax
	leaq	.L.str.5(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp245:
	leaq	.L.str.31(%rip), %rdx
	leaq	.L.str.34(%rip), %rcx
	leaq	.L.str.16(%rip), %r8
.Ltmp246:
.LBB0_155:
	leaq	.L.str.4(%rip), %r9
.Ltmp247:
.LBB0_156:
	movl	$6, %esi
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	pushq	%r10
	.cfi_adjust_cfa_offset 8
.Ltmp248:
.LBB0_157:
	callq	__tvm_set_raised_6
	jmp	.LBB0_185
.Ltmp249:
.LBB0_158:
	.cfi_def_cfa_offset 112
	leaq	.L.str.33(%rip), %rax
	leaq	.L.str.17(%rip), %rdi
.Ltmp250:
	leaq	.L.str.18(%rip), %rdx
	leaq	.L.str.31(%rip), %rcx
	leaq	.L.str.32(%rip), %r8
	leaq	.L.str.16(%rip), %r9
.Ltmp251:
.LBB0_159:
	movl	$7, %esi
.Ltmp252:
	pushq	$0
.Ltmp253:
	.cfi_adjust_cfa_offset 8
	jmp	.LBB0_164
.Ltmp254:
.LBB0_160:
	.cfi_def_cfa_offset 112
	leaq	.L.str.48(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp255:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.47(%rip), %rcx
	leaq	.L.str.37(%rip), %r8
.Ltmp256:
.LBB0_161:
	leaq	.L.str.9(%rip), %r9
	jmp	.LBB0_183
.Ltmp257:
.LBB0_162:
	leaq	.L.str.9(%rip), %r9
	leaq	.L.str.10(%rip), %rax
	leaq	.L.str.17(%rip), %rdi
.Ltmp258:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.49(%rip), %rcx
	leaq	.L.str.37(%rip), %r8
.Ltmp259:
.LBB0_163:
	movl	$8, %esi
	pushq	%r9
	.cfi_adjust_cfa_offset 8
.Ltmp260:
.LBB0_164:
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	jmp	.LBB0_184
.Ltmp261:
.LBB0_165:
	.cfi_def_cfa_offset 112
	leaq	.L.str.48(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp262:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.50(%rip), %rcx
	jmp	.LBB0_168
.Ltmp263:
.LBB0_166:
	leaq	.L.str.52(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp264:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.51(%rip), %rcx
	jmp	.LBB0_168
.Ltmp265:
.LBB0_167:
	leaq	.L.str.9(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp266:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.53(%rip), %rcx
.Ltmp267:
.LBB0_168:
	leaq	.L.str.37(%rip), %r8
	leaq	.L.str.12(%rip), %r9
	jmp	.LBB0_183
.Ltmp268:
.LBB0_169:
	leaq	.L.str.48(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp269:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.54(%rip), %rcx
	jmp	.LBB0_172
.Ltmp270:
.LBB0_170:
	leaq	.L.str.56(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp271:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.55(%rip), %rcx
	jmp	.LBB0_172
.Ltmp272:
.LBB0_171:
	leaq	.L.str.9(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp273:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.57(%rip), %rcx
.Ltmp274:
.LBB0_172:
	leaq	.L.str.37(%rip), %r8
	leaq	.L.str.13(%rip), %r9
	jmp	.LBB0_183
.Ltmp275:
.LBB0_173:
	leaq	.L.str.12(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp276:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.58(%rip), %rcx
	jmp	.LBB0_175
.Ltmp277:
.LBB0_174:
	leaq	.L.str.9(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp278:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.59(%rip), %rcx
.Ltmp279:
.LBB0_175:
	leaq	.L.str.37(%rip), %r8
	leaq	.L.str.14(%rip), %r9
	jmp	.LBB0_183
.Ltmp280:
.LBB0_176:
	leaq	.L.str.48(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp281:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.60(%rip), %rcx
	jmp	.LBB0_178
.Ltmp282:
.LBB0_177:
	leaq	.L.str.9(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp283:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.61(%rip), %rcx
.Ltmp284:
.LBB0_178:
	leaq	.L.str.37(%rip), %r8
	leaq	.L.str.15(%rip), %r9
	jmp	.LBB0_183
.Ltmp285:
.LBB0_179:
	leaq	.L.str.48(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp286:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.62(%rip), %rcx
	jmp	.LBB0_181
.Ltmp287:
.LBB0_180:
	leaq	.L.str.9(%rip), %rax
	leaq	.L.str.10(%rip), %r10
	leaq	.L.str.17(%rip), %rdi
.Ltmp288:
	leaq	.L.str.46(%rip), %rdx
	leaq	.L.str.63(%rip), %rcx
.Ltmp289:
.LBB0_181:
	leaq	.L.str.37(%rip), %r8
.Ltmp290:
.LBB0_182:
	leaq	.L.str.16(%rip), %r9
.Ltmp291:
.LBB0_183:
	movl	$8, %esi
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	pushq	%r10
	.cfi_adjust_cfa_offset 8
.Ltmp292:
.LBB0_184:
	callq	__tvm_set_raised_12
.Ltmp293:
.LBB0_185:
	addq	$16, %rsp
	.cfi_adjust_cfa_offset -16
	movl	$-1, %eax
	addq	$56, %rsp
	.cfi_def_cfa_offset 56
	jmp	.LBB0_111
.Ltmp294:
.Lfunc_end0:
	.size	__tvm_ffi_main, .Lfunc_end0-__tvm_ffi_main
	.cfi_endproc

	.p2align	4
	.type	__tvm_set_raised_6,@function
__tvm_set_raised_6:
.Lfunc_begin1:
	.cfi_startproc
	subq	$56, %rsp
	.cfi_def_cfa_offset 64
	movl	%esi, %eax
	vmovaps	64(%rsp), %xmm0
	movq	%rdx, 8(%rsp)
	movq	%rcx, 16(%rsp)
	movq	%r8, 24(%rsp)
	movq	%r9, 32(%rsp)
	vmovups	%xmm0, 40(%rsp)
	leaq	8(%rsp), %rsi
	movl	%eax, %edx
	callq	TVMFFIErrorSetRaisedFromCStrParts@PLT
	addq	$56, %rsp
	.cfi_def_cfa_offset 8
	retq
.Lfunc_end1:
	.size	__tvm_set_raised_6, .Lfunc_end1-__tvm_set_raised_6
	.cfi_endproc

	.p2align	4
	.type	__tvm_set_raised_12,@function
__tvm_set_raised_12:
.Lfunc_begin2:
	.cfi_startproc
	subq	$104, %rsp
	.cfi_def_cfa_offset 112
	movl	%esi, %eax
	vmovaps	112(%rsp), %xmm0
	movq	%rdx, 8(%rsp)
	movq	%rcx, 16(%rsp)
	movq	%r8, 24(%rsp)
	movq	%r9, 32(%rsp)
	leaq	.L.str.4(%rip), %rcx
	movq	%rcx, 40(%rsp)
	leaq	.L.str.5(%rip), %rcx
	movq	%rcx, 48(%rsp)
	vmovups	%xmm0, 56(%rsp)
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 72(%rsp)
	leaq	8(%rsp), %rsi
	movl	%eax, %edx
	vzeroupper
	callq	TVMFFIErrorSetRaisedFromCStrParts@PLT
	addq	$104, %rsp
	.cfi_def_cfa_offset 8
	retq
.Lfunc_end2:
	.size	__tvm_set_raised_12, .Lfunc_end2-__tvm_set_raised_12
	.cfi_endproc

	.section	.rodata,"a",@progbits
	.p2align	6, 0x0
.LCPI3_0:
	.quad	64
	.quad	65
	.quad	80
	.quad	81
	.quad	96
	.quad	97
	.quad	112
	.quad	113
.LCPI3_1:
	.zero	8
	.quad	1
	.quad	16
	.quad	17
	.quad	32
	.quad	33
	.quad	48
	.quad	49
	.text
	.p2align	4
	.type	main_compute_,@function
main_compute_:
.Lfunc_begin3:
	.loc	1 0 0
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%r13
	.cfi_def_cfa_offset 40
	pushq	%r12
	.cfi_def_cfa_offset 48
	pushq	%rbx
	.cfi_def_cfa_offset 56
	subq	$104, %rsp
	.cfi_def_cfa_offset 160
	.cfi_offset %rbx, -56
	.cfi_offset %r12, -48
	.cfi_offset %r13, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
.Ltmp295:
	movq	%r9, 24(%rsp)
.Ltmp296:
	movq	%r8, %rbx
.Ltmp297:
	movq	%rcx, %r13
.Ltmp298:
	movq	%rdx, %rbp
.Ltmp299:
	movl	%esi, %r12d
	movq	%rdi, %r15
.Ltmp300:
	leaq	7(%rdi), %r14
	sarq	$3, %r14
.Ltmp301:
	movq	%r14, %rdx
.Ltmp302:
	shlq	$16, %rdx
	movq	__TVMBackendAllocWorkspace@GOTPCREL(%rip), %rax
	movl	$1, %edi
.Ltmp303:
	movl	$1, %ecx
.Ltmp304:
	movl	$16, %r8d
.Ltmp305:
	callq	*(%rax)
.Ltmp306:
	movl	$-1, %ecx
	testq	%rax, %rax
	jne	.LBB3_1
.Ltmp307:
.LBB3_13:
	movl	%ecx, %eax
	addq	$104, %rsp
	.cfi_def_cfa_offset 56
	popq	%rbx
.Ltmp308:
	.cfi_def_cfa_offset 48
	popq	%r12
	.cfi_def_cfa_offset 40
	popq	%r13
	.cfi_def_cfa_offset 32
	popq	%r14
.Ltmp309:
	.cfi_def_cfa_offset 24
	popq	%r15
.Ltmp310:
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.Ltmp311:
.LBB3_1:
	.cfi_def_cfa_offset 160
	movl	%r12d, 12(%rsp)
.Ltmp312:
	movq	%r13, 16(%rsp)
.Ltmp313:
	testq	%r14, %r14
	jle	.LBB3_10
.Ltmp314:
	xorl	%r13d, %r13d
	vmovdqa64	.LCPI3_0(%rip), %zmm0
	vmovdqa64	.LCPI3_1(%rip), %zmm1
	xorl	%edi, %edi
	jmp	.LBB3_3
.Ltmp315:
	.p2align	4
.LBB3_9:
	incq	%rdi
.Ltmp316:
	addq	$32768, %r13
	addq	$65536, %rbp
	cmpq	%r14, %rdi
	je	.LBB3_10
.Ltmp317:
.LBB3_3:
	leaq	(,%rdi,8), %r8
.Ltmp318:
	movq	%rbp, %r9
	xorl	%r10d, %r10d
	jmp	.LBB3_4
.Ltmp319:
	.p2align	4
.LBB3_8:
	incq	%r10
.Ltmp320:
	addq	$8192, %r9
	cmpq	$8, %r10
	je	.LBB3_9
.Ltmp321:
.LBB3_4:
	leaq	(%r10,%r8), %r11
	leaq	(%r10,%r10), %rcx
.Ltmp322:
	movq	%r13, %rdx
	xorl	%r12d, %r12d
	jmp	.LBB3_5
.Ltmp323:
	.p2align	4
.LBB3_7:
	movq	%rdx, %rsi
	orq	%rcx, %rsi
	vpbroadcastq	%rsi, %zmm3
	vpextrw	$0, %xmm2, (%rax,%rsi,2)
	vporq	%zmm1, %zmm3, %zmm4
	vpextrq	$1, %xmm4, %rsi
	vpextrw	$1, %xmm2, (%rax,%rsi,2)
	vextracti128	$1, %ymm4, %xmm5
	vmovq	%xmm5, %rsi
	vpextrw	$2, %xmm2, (%rax,%rsi,2)
	vpextrq	$1, %xmm5, %rsi
	vpextrw	$3, %xmm2, (%rax,%rsi,2)
	vextracti32x4	$2, %zmm4, %xmm5
	vmovq	%xmm5, %rsi
	vpextrw	$4, %xmm2, (%rax,%rsi,2)
	vpextrq	$1, %xmm5, %rsi
	vpextrw	$5, %xmm2, (%rax,%rsi,2)
	vextracti32x4	$3, %zmm4, %xmm4
	vmovq	%xmm4, %rsi
	vpextrw	$6, %xmm2, (%rax,%rsi,2)
	vpextrq	$1, %xmm4, %rsi
	vpextrw	$7, %xmm2, (%rax,%rsi,2)
	vporq	%zmm0, %zmm3, %zmm3
	vmovq	%xmm3, %rsi
	vextracti128	$1, %ymm2, %xmm2
	vpextrw	$0, %xmm2, (%rax,%rsi,2)
	vpextrq	$1, %xmm3, %rsi
	vpextrw	$1, %xmm2, (%rax,%rsi,2)
	vextracti128	$1, %ymm3, %xmm4
	vmovq	%xmm4, %rsi
	vpextrw	$2, %xmm2, (%rax,%rsi,2)
	vpextrq	$1, %xmm4, %rsi
	vpextrw	$3, %xmm2, (%rax,%rsi,2)
	vextracti32x4	$2, %zmm3, %xmm4
	vmovq	%xmm4, %rsi
	vpextrw	$4, %xmm2, (%rax,%rsi,2)
	vpextrq	$1, %xmm4, %rsi
	vpextrw	$5, %xmm2, (%rax,%rsi,2)
	vextracti32x4	$3, %zmm3, %xmm3
	vmovq	%xmm3, %rsi
	vpextrw	$6, %xmm2, (%rax,%rsi,2)
	vpextrq	$1, %xmm3, %rsi
	vpextrw	$7, %xmm2, (%rax,%rsi,2)
.Ltmp324:
	addq	$32, %r12
.Ltmp325:
	subq	$-128, %rdx
	cmpq	$8192, %r12
	je	.LBB3_8
.Ltmp326:
.LBB3_5:
	vpxor	%xmm2, %xmm2, %xmm2
	cmpq	%r15, %r11
.Ltmp327:
	jge	.LBB3_7
.Ltmp328:
	vmovdqu	(%r9,%r12), %ymm2
	jmp	.LBB3_7
.Ltmp329:
.LBB3_10:
	movl	12(%rsp), %r13d
	movl	%r13d, 32(%rsp)
	movq	%rbx, 40(%rsp)
	movq	16(%rsp), %rcx
	movq	%rcx, 48(%rsp)
	movq	%r14, 56(%rsp)
	movq	%rax, %r12
	movq	%rax, 64(%rsp)
	movq	%r15, 72(%rsp)
	movq	168(%rsp), %rax
.Ltmp330:
	movq	%rax, 80(%rsp)
	movq	24(%rsp), %rax
	movq	%rax, 88(%rsp)
	movq	160(%rsp), %rax
	movq	%rax, 96(%rsp)
	movq	__TVMBackendParallelLaunch@GOTPCREL(%rip), %rax
	leaq	.L__tvm_parallel_lambda(%rip), %rdi
	leaq	32(%rsp), %rsi
	xorl	%ebp, %ebp
	xorl	%edx, %edx
	vzeroupper
	callq	*(%rax)
	testl	%eax, %eax
	jne	.LBB3_11
.Ltmp331:
	movq	__TVMBackendFreeWorkspace@GOTPCREL(%rip), %rax
	movl	$1, %edi
	movl	%r13d, %esi
	movq	%r12, %rdx
	callq	*(%rax)
	negl	%eax
	sbbl	%ebp, %ebp
	movl	%ebp, %ecx
	jmp	.LBB3_13
.Ltmp332:
.LBB3_11:
	movl	%eax, %ecx
	jmp	.LBB3_13
.Lfunc_end3:
	.size	main_compute_, .Lfunc_end3-main_compute_
	.cfi_endproc

	.section	.rodata.cst16,"aM",@progbits,16
	.p2align	4, 0x0
.LCPI4_0:
	.long	0
	.long	4
	.long	16
	.long	20
.LCPI4_2:
	.long	0
	.long	4
	.long	8
	.long	12
.LCPI4_3:
	.long	1
	.long	5
	.long	17
	.long	21
.LCPI4_5:
	.long	1
	.long	5
	.long	9
	.long	13
.LCPI4_6:
	.long	2
	.long	6
	.long	18
	.long	22
.LCPI4_8:
	.long	2
	.long	6
	.long	10
	.long	14
.LCPI4_9:
	.long	3
	.long	7
	.long	19
	.long	23
.LCPI4_10:
	.long	3
	.long	7
	.long	11
	.long	15
.LCPI4_22:
	.long	4
	.long	20
	.long	5
	.long	21
.LCPI4_26:
	.long	12
	.long	28
	.long	13
	.long	29
.LCPI4_40:
	.long	10
	.long	26
	.long	11
	.long	27
.LCPI4_41:
	.long	14
	.long	30
	.long	15
	.long	31
	.section	.rodata.cst32,"aM",@progbits,32
	.p2align	5, 0x0
.LCPI4_1:
	.zero	4
	.zero	4
	.zero	4
	.zero	4
	.long	0
	.long	4
	.long	8
	.long	12
.LCPI4_4:
	.zero	4
	.zero	4
	.zero	4
	.zero	4
	.long	1
	.long	5
	.long	9
	.long	13
.LCPI4_7:
	.zero	4
	.zero	4
	.zero	4
	.zero	4
	.long	2
	.long	6
	.long	10
	.long	14
.LCPI4_11:
	.zero	4
	.zero	4
	.zero	4
	.zero	4
	.long	3
	.long	7
	.long	11
	.long	15
.LCPI4_19:
	.long	4
	.long	20
	.long	5
	.long	21
	.long	6
	.long	22
	.long	7
	.long	23
.LCPI4_21:
	.long	12
	.long	28
	.long	13
	.long	29
	.long	14
	.long	30
	.long	15
	.long	31
.LCPI4_23:
	.long	8
	.long	24
	.long	10
	.long	26
	.long	9
	.long	25
	.long	11
	.long	27
.LCPI4_25:
	.long	10
	.long	26
	.long	11
	.long	27
	.long	10
	.long	26
	.long	11
	.long	27
.LCPI4_27:
	.zero	4
	.zero	4
	.long	10
	.long	26
	.zero	4
	.zero	4
	.long	11
	.long	27
.LCPI4_28:
	.long	0
	.long	10
	.long	1
	.long	11
	.long	2
	.long	14
	.long	3
	.long	15
.LCPI4_29:
	.long	0
	.long	8
	.long	1
	.long	9
	.long	2
	.long	10
	.long	3
	.long	11
.LCPI4_30:
	.long	0
	.long	8
	.long	2
	.long	10
	.long	1
	.long	9
	.long	3
	.long	11
.LCPI4_31:
	.long	14
	.long	30
	.long	15
	.long	31
	.long	14
	.long	30
	.long	15
	.long	31
	.section	.rodata.cst4,"aM",@progbits,4
	.p2align	2, 0x0
.LCPI4_12:
	.long	2147483648
.LCPI4_13:
	.long	127
.LCPI4_14:
	.long	1006632960
.LCPI4_15:
	.long	0x3b000000
.LCPI4_16:
	.long	7
.LCPI4_17:
	.long	2143289344
.LCPI4_35:
	.long	1
.LCPI4_36:
	.long	32767
.LCPI4_37:
	.long	0x7fffffff
.LCPI4_38:
	.long	2139095041
.LCPI4_39:
	.long	32704
	.section	.rodata,"a",@progbits
	.p2align	6, 0x0
.LCPI4_18:
	.long	0
	.long	16
	.long	1
	.long	17
	.long	2
	.long	18
	.long	3
	.long	19
	.long	4
	.long	20
	.long	5
	.long	21
	.long	6
	.long	22
	.long	7
	.long	23
.LCPI4_20:
	.long	8
	.long	24
	.long	9
	.long	25
	.long	10
	.long	26
	.long	11
	.long	27
	.long	12
	.long	28
	.long	13
	.long	29
	.long	14
	.long	30
	.long	15
	.long	31
.LCPI4_24:
	.long	0
	.long	16
	.long	1
	.long	17
	.long	2
	.long	20
	.long	3
	.long	21
	.long	4
	.long	18
	.long	5
	.long	19
	.long	6
	.long	22
	.long	7
	.long	23
.LCPI4_32:
	.long	4
	.long	20
	.long	5
	.long	21
	.long	4
	.long	20
	.long	5
	.long	21
	.long	12
	.long	28
	.long	13
	.long	29
	.long	12
	.long	28
	.long	13
	.long	29
.LCPI4_33:
	.long	0x00000000
	.long	0x3f000000
	.long	0x3f800000
	.long	0x3fc00000
	.long	0x40000000
	.long	0x40400000
	.long	0x40800000
	.long	0x40c00000
	.long	0x80000000
	.long	0xbf000000
	.long	0xbf800000
	.long	0xbfc00000
	.long	0xc0000000
	.long	0xc0400000
	.long	0xc0800000
	.long	0xc0c00000
.LCPI4_34:
	.short	1
	.short	33
	.short	3
	.short	35
	.short	5
	.short	37
	.short	7
	.short	39
	.short	9
	.short	41
	.short	11
	.short	43
	.short	13
	.short	45
	.short	15
	.short	47
	.short	17
	.short	49
	.short	19
	.short	51
	.short	21
	.short	53
	.short	23
	.short	55
	.short	25
	.short	57
	.short	27
	.short	59
	.short	29
	.short	61
	.short	31
	.short	63
	.text
	.p2align	4
	.type	.L__tvm_parallel_lambda,@function
.L__tvm_parallel_lambda:
.Lfunc_begin4:
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%r13
	.cfi_def_cfa_offset 40
	pushq	%r12
	.cfi_def_cfa_offset 48
	pushq	%rbx
	.cfi_def_cfa_offset 56
	subq	$1496, %rsp
	.cfi_def_cfa_offset 1552
	.cfi_offset %rbx, -56
	.cfi_offset %r12, -48
	.cfi_offset %r13, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
	movl	(%rdx), %ebx
	movq	8(%rdx), %rcx
	movq	16(%rdx), %r15
	movq	24(%rdx), %r8
	movq	32(%rdx), %r12
	movq	40(%rdx), %r9
	movq	48(%rdx), %r10
	movq	56(%rdx), %r11
	movq	64(%rdx), %r14
	movslq	8(%rsi), %rsi
	leaq	127(%rsi), %rax
	movq	%rax, %rdx
	orq	%rsi, %rdx
	shrq	$32, %rdx
	je	.LBB4_2
	cqto
	idivq	%rsi
	jmp	.LBB4_3
.LBB4_2:
	xorl	%edx, %edx
	divl	%esi
.LBB4_3:
	movslq	%edi, %rdx
	leaq	1(%rdx), %rsi
	imulq	%rax, %rsi
	cmpq	$128, %rsi
	movl	$128, %r13d
	cmovlq	%rsi, %r13
	movq	%rax, %rbp
	imulq	%rdx, %rbp
	cmpq	%r13, %rbp
	jge	.LBB4_43
	movq	%r14, 8(%rsp)
	movq	%r11, 16(%rsp)
	movq	%r10, 136(%rsp)
	movq	%r9, 24(%rsp)
	movq	%r8, 56(%rsp)
	imulq	%rdx, %rax
	shlq	$13, %rax
	addq	%rcx, %rax
	addq	$2048, %rax
	movq	%rax, 48(%rsp)
	addq	$252, %r12
	movq	%r12, 128(%rsp)
	movq	__TVMBackendAllocWorkspace@GOTPCREL(%rip), %r9
	vbroadcasti32x4	.LCPI4_0(%rip), %zmm0
	vmovdqu64	%zmm0, 1424(%rsp)
	vbroadcasti32x4	.LCPI4_3(%rip), %zmm0
	vmovdqu64	%zmm0, 1360(%rsp)
	vbroadcasti32x4	.LCPI4_6(%rip), %zmm0
	vmovdqu64	%zmm0, 1296(%rsp)
	vbroadcasti32x4	.LCPI4_9(%rip), %zmm0
	vmovdqu64	%zmm0, 1232(%rsp)
.LBB4_5:
	movl	$32768, %edx
	movl	$1, %edi
	movl	%ebx, %esi
	movl	$2, %ecx
	movl	$32, %r8d
	movl	%ebx, %r12d
	movq	%r9, %rbx
	vzeroupper
	callq	*(%r9)
	movq	%rax, %r14
	movl	$-1, %eax
	testq	%r14, %r14
	je	.LBB4_44
	movq	%r15, 40(%rsp)
	movq	%r14, 32(%rsp)
	movl	$1024, %edx
	movl	$1, %edi
	movl	%r12d, 4(%rsp)
	movl	%r12d, %esi
	xorl	%ecx, %ecx
	movl	$32, %r8d
	callq	*(%rbx)
	testq	%rax, %rax
	je	.LBB4_45
	movq	%rax, %r15
	movl	$262144, %edx
	movl	$1, %edi
	movl	4(%rsp), %esi
	movl	$1, %ecx
	movl	$16, %r8d
	movq	__TVMBackendAllocWorkspace@GOTPCREL(%rip), %rax
	callq	*(%rax)
	testq	%rax, %rax
	je	.LBB4_45
	movq	%rax, %rbx
	movq	32(%rsp), %rax
	addq	$960, %rax
	movb	$1, %cl
	xorl	%edx, %edx
.LBB4_9:
	movq	%rdx, %rsi
	shlq	$12, %rsi
	shlq	$14, %rdx
	addq	%rax, %rdx
	addq	48(%rsp), %rsi
	movq	$-256, %rdi
.LBB4_10:
	vmovdqu	-1792(%rsi,%rdi), %xmm0
	vmovdqu	-1280(%rsi,%rdi), %xmm1
	vmovdqu	-768(%rsi,%rdi), %xmm2
	vmovdqu	-256(%rsi,%rdi), %xmm4
	vmovdqu	256(%rsi,%rdi), %xmm3
	vmovdqu	768(%rsi,%rdi), %xmm5
	vmovdqu	1280(%rsi,%rdi), %xmm6
	vmovdqu	1792(%rsi,%rdi), %xmm7
	vinserti32x4	$1, 2048(%rsi,%rdi), %zmm7, %zmm7
	vinserti32x4	$1, 1536(%rsi,%rdi), %zmm6, %zmm6
	vmovdqa64	%zmm6, %zmm8
	vinserti32x4	$1, 1024(%rsi,%rdi), %zmm5, %zmm9
	vmovdqu64	1424(%rsp), %zmm5
	vpermt2d	%zmm7, %zmm5, %zmm8
	vinserti32x4	$1, 512(%rsi,%rdi), %zmm3, %zmm3
	vmovdqa64	%zmm3, %zmm10
	vpermt2d	%zmm9, %zmm5, %zmm10
	movb	$-64, %r8b
	kmovd	%r8d, %k1
	vinserti128	$1, (%rsi,%rdi), %ymm4, %ymm11
	vmovdqa64	%zmm8, %zmm10 {%k1}
	vinserti128	$1, -512(%rsi,%rdi), %ymm2, %ymm4
	vmovdqa	%ymm4, %ymm2
	vbroadcasti128	.LCPI4_2(%rip), %ymm5
	vpermt2d	%ymm11, %ymm5, %ymm2
	vinserti128	$1, -1024(%rsi,%rdi), %ymm1, %ymm8
	vinserti128	$1, -1536(%rsi,%rdi), %ymm0, %ymm5
	vmovdqa	%ymm5, %ymm0
	vmovdqa	.LCPI4_2(%rip), %xmm1
	vpermt2d	%ymm8, %ymm1, %ymm0
	vpblendd	$240, %ymm2, %ymm0, %ymm0
	vinserti64x4	$0, %ymm0, %zmm10, %zmm0
	vmovdqa64	%zmm6, %zmm1
	vmovdqu64	1360(%rsp), %zmm10
	vpermt2d	%zmm7, %zmm10, %zmm1
	vmovdqa64	%zmm3, %zmm2
	vpermt2d	%zmm9, %zmm10, %zmm2
	vmovdqa64	%zmm1, %zmm2 {%k1}
	vmovdqa	%ymm4, %ymm1
	vbroadcasti128	.LCPI4_5(%rip), %ymm10
	vpermt2d	%ymm11, %ymm10, %ymm1
	vmovdqa	%ymm5, %ymm10
	vmovdqa	.LCPI4_5(%rip), %xmm12
	vpermt2d	%ymm8, %ymm12, %ymm10
	vpblendd	$240, %ymm1, %ymm10, %ymm1
	vinserti64x4	$0, %ymm1, %zmm2, %zmm1
	vmovdqa64	%zmm6, %zmm2
	vmovdqu64	1296(%rsp), %zmm12
	vpermt2d	%zmm7, %zmm12, %zmm2
	vmovdqa64	%zmm3, %zmm10
	vpermt2d	%zmm9, %zmm12, %zmm10
	vmovdqa64	%zmm2, %zmm10 {%k1}
	vmovdqa	%ymm4, %ymm2
	vbroadcasti128	.LCPI4_8(%rip), %ymm12
	vpermt2d	%ymm11, %ymm12, %ymm2
	vmovdqa	%ymm5, %ymm12
	vmovdqa	.LCPI4_8(%rip), %xmm13
	vpermt2d	%ymm8, %ymm13, %ymm12
	vpblendd	$240, %ymm2, %ymm12, %ymm2
	vinserti64x4	$0, %ymm2, %zmm10, %zmm2
	vmovdqu64	1232(%rsp), %zmm10
	vpermt2d	%zmm7, %zmm10, %zmm6
	vpermt2d	%zmm9, %zmm10, %zmm3
	vmovdqa64	%zmm6, %zmm3 {%k1}
	vmovdqa	.LCPI4_10(%rip), %xmm6
	vpermt2d	%ymm8, %ymm6, %ymm5
	vbroadcasti128	.LCPI4_10(%rip), %ymm6
	vpermt2d	%ymm11, %ymm6, %ymm4
	vpslld	$24, %zmm0, %zmm6
	vpbroadcastd	.LCPI4_12(%rip), %zmm10
	vpandd	%zmm10, %zmm6, %zmm6
	vpbroadcastd	.LCPI4_13(%rip), %zmm11
	vpandd	%zmm11, %zmm0, %zmm7
	vpslld	$20, %zmm7, %zmm8
	vcvtdq2ps	%zmm7, %zmm9
	vbroadcastss	.LCPI4_15(%rip), %zmm13
	vmulps	%zmm13, %zmm9, %zmm9
	vpbroadcastd	.LCPI4_16(%rip), %zmm14
	vpcmpgtd	%zmm14, %zmm7, %k1
	vpbroadcastd	.LCPI4_14(%rip), %zmm12
	vpaddd	%zmm12, %zmm8, %zmm9 {%k1}
	vpcmpneqd	%zmm11, %zmm7, %k1
	vpbroadcastd	.LCPI4_17(%rip), %zmm15
	vmovdqa64	%zmm15, %zmm7
	vpord	%zmm6, %zmm9, %zmm7 {%k1}
	vmovdqu64	%zmm7, -960(%rdx)
	vpblendd	$240, %ymm4, %ymm5, %ymm4
	vpsrld	$8, %zmm0, %zmm5
	vpslld	$16, %zmm0, %zmm6
	vpandd	%zmm10, %zmm6, %zmm6
	vpandd	%zmm11, %zmm5, %zmm5
	vpslld	$20, %zmm5, %zmm7
	vcvtdq2ps	%zmm5, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm5, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm5, %k1
	vmovdqa64	%zmm15, %zmm5
	vpord	%zmm6, %zmm8, %zmm5 {%k1}
	vmovdqu64	%zmm5, -896(%rdx)
	vpsrld	$16, %zmm0, %zmm5
	vpslld	$8, %zmm0, %zmm6
	vpandd	%zmm10, %zmm6, %zmm6
	vpandd	%zmm11, %zmm5, %zmm5
	vpslld	$20, %zmm5, %zmm7
	vcvtdq2ps	%zmm5, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm5, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm5, %k1
	vmovdqa64	%zmm15, %zmm5
	vpord	%zmm6, %zmm8, %zmm5 {%k1}
	vmovdqu64	%zmm5, -832(%rdx)
	vpsrld	$24, %zmm0, %zmm5
	vpandd	%zmm10, %zmm0, %zmm6
	vpandd	%zmm11, %zmm5, %zmm5
	vpslld	$20, %zmm5, %zmm7
	vcvtdq2ps	%zmm5, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm5, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm5, %k1
	vmovdqa64	%zmm15, %zmm5
	vpord	%zmm6, %zmm8, %zmm5 {%k1}
	vmovdqu64	%zmm5, -768(%rdx)
	vpslld	$24, %zmm1, %zmm5
	vpandd	%zmm10, %zmm5, %zmm5
	vpandd	%zmm11, %zmm1, %zmm6
	vpslld	$20, %zmm6, %zmm7
	vcvtdq2ps	%zmm6, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm6, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm6, %k1
	vmovdqa64	%zmm15, %zmm6
	vpord	%zmm5, %zmm8, %zmm6 {%k1}
	vmovdqu64	%zmm6, -704(%rdx)
	vpsrld	$8, %zmm1, %zmm5
	vpslld	$16, %zmm1, %zmm6
	vpandd	%zmm10, %zmm6, %zmm6
	vpandd	%zmm11, %zmm5, %zmm5
	vpslld	$20, %zmm5, %zmm7
	vcvtdq2ps	%zmm5, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm5, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm5, %k1
	vmovdqa64	%zmm15, %zmm5
	vpord	%zmm6, %zmm8, %zmm5 {%k1}
	vmovdqu64	%zmm5, -640(%rdx)
	vpsrld	$16, %zmm1, %zmm5
	vpslld	$8, %zmm1, %zmm6
	vpandd	%zmm10, %zmm6, %zmm6
	vpandd	%zmm11, %zmm5, %zmm5
	vpslld	$20, %zmm5, %zmm7
	vcvtdq2ps	%zmm5, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm5, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm5, %k1
	vmovdqa64	%zmm15, %zmm5
	vpord	%zmm6, %zmm8, %zmm5 {%k1}
	vmovdqu64	%zmm5, -576(%rdx)
	vpsrld	$24, %zmm1, %zmm5
	vpandd	%zmm10, %zmm1, %zmm6
	vpandd	%zmm11, %zmm5, %zmm5
	vpslld	$20, %zmm5, %zmm7
	vcvtdq2ps	%zmm5, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm5, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm5, %k1
	vmovdqa64	%zmm15, %zmm5
	vpord	%zmm6, %zmm8, %zmm5 {%k1}
	vmovdqu64	%zmm5, -512(%rdx)
	vpslld	$24, %zmm2, %zmm5
	vpandd	%zmm10, %zmm5, %zmm5
	vpandd	%zmm11, %zmm2, %zmm6
	vpslld	$20, %zmm6, %zmm7
	vcvtdq2ps	%zmm6, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm6, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm6, %k1
	vmovdqa64	%zmm15, %zmm6
	vpord	%zmm5, %zmm8, %zmm6 {%k1}
	vmovdqu64	%zmm6, -448(%rdx)
	vpsrld	$8, %zmm2, %zmm5
	vpslld	$16, %zmm2, %zmm6
	vpandd	%zmm10, %zmm6, %zmm6
	vpandd	%zmm11, %zmm5, %zmm5
	vpslld	$20, %zmm5, %zmm7
	vcvtdq2ps	%zmm5, %zmm8
	vmulps	%zmm13, %zmm8, %zmm8
	vpcmpgtd	%zmm14, %zmm5, %k1
	vpaddd	%zmm12, %zmm7, %zmm8 {%k1}
	vpcmpneqd	%zmm11, %zmm5, %k1
	vmovdqa64	%zmm15, %zmm5
	vpord	%zmm6, %zmm8, %zmm5 {%k1}
	vmovdqu64	%zmm5, -384(%rdx)
	vinserti64x4	$0, %ymm4, %zmm3, %zmm3
	vpsrld	$16, %zmm2, %zmm4
	vpslld	$8, %zmm2, %zmm5
	vpandd	%zmm10, %zmm5, %zmm5
	vpandd	%zmm11, %zmm4, %zmm4
	vpslld	$20, %zmm4, %zmm6
	vcvtdq2ps	%zmm4, %zmm7
	vmulps	%zmm13, %zmm7, %zmm7
	vpcmpgtd	%zmm14, %zmm4, %k1
	vpaddd	%zmm12, %zmm6, %zmm7 {%k1}
	vpcmpneqd	%zmm11, %zmm4, %k1
	vmovdqa64	%zmm15, %zmm4
	vpord	%zmm5, %zmm7, %zmm4 {%k1}
	vmovdqu64	%zmm4, -320(%rdx)
	vpsrld	$24, %zmm2, %zmm4
	vpandd	%zmm10, %zmm2, %zmm5
	vpandd	%zmm11, %zmm4, %zmm4
	vpslld	$20, %zmm4, %zmm6
	vcvtdq2ps	%zmm4, %zmm7
	vmulps	%zmm13, %zmm7, %zmm7
	vpcmpgtd	%zmm14, %zmm4, %k1
	vpaddd	%zmm12, %zmm6, %zmm7 {%k1}
	vpcmpneqd	%zmm11, %zmm4, %k1
	vmovdqa64	%zmm15, %zmm4
	vpord	%zmm5, %zmm7, %zmm4 {%k1}
	vmovdqu64	%zmm4, -256(%rdx)
	vpslld	$24, %zmm3, %zmm4
	vpandd	%zmm10, %zmm4, %zmm4
	vpandd	%zmm11, %zmm3, %zmm5
	vpslld	$20, %zmm5, %zmm6
	vcvtdq2ps	%zmm5, %zmm7
	vmulps	%zmm13, %zmm7, %zmm7
	vpcmpgtd	%zmm14, %zmm5, %k1
	vpaddd	%zmm12, %zmm6, %zmm7 {%k1}
	vpcmpneqd	%zmm11, %zmm5, %k1
	vmovdqa64	%zmm15, %zmm5
	vpord	%zmm4, %zmm7, %zmm5 {%k1}
	vmovdqu64	%zmm5, -192(%rdx)
	vpsrld	$8, %zmm3, %zmm4
	vpslld	$16, %zmm3, %zmm5
	vpandd	%zmm10, %zmm5, %zmm5
	vpandd	%zmm11, %zmm4, %zmm4
	vpslld	$20, %zmm4, %zmm6
	vcvtdq2ps	%zmm4, %zmm7
	vmulps	%zmm13, %zmm7, %zmm7
	vpcmpgtd	%zmm14, %zmm4, %k1
	vpaddd	%zmm12, %zmm6, %zmm7 {%k1}
	vpcmpneqd	%zmm11, %zmm4, %k1
	vmovdqa64	%zmm15, %zmm4
	vpord	%zmm5, %zmm7, %zmm4 {%k1}
	vmovdqu64	%zmm4, -128(%rdx)
	vpsrld	$16, %zmm3, %zmm4
	vpslld	$8, %zmm3, %zmm5
	vpandd	%zmm10, %zmm5, %zmm5
	vpandd	%zmm11, %zmm4, %zmm4
	vpslld	$20, %zmm4, %zmm6
	vcvtdq2ps	%zmm4, %zmm7
	vmulps	%zmm13, %zmm7, %zmm7
	vpcmpgtd	%zmm14, %zmm4, %k1
	vpaddd	%zmm12, %zmm6, %zmm7 {%k1}
	vpcmpneqd	%zmm11, %zmm4, %k1
	vmovdqa64	%zmm15, %zmm4
	vpord	%zmm5, %zmm7, %zmm4 {%k1}
	vmovdqu64	%zmm4, -64(%rdx)
	vpsrld	$24, %zmm3, %zmm4
	vpandd	%zmm10, %zmm3, %zmm5
	vpandd	%zmm11, %zmm4, %zmm4
	vpslld	$20, %zmm4, %zmm6
	vcvtdq2ps	%zmm4, %zmm7
	vmulps	%zmm13, %zmm7, %zmm7
	vpcmpgtd	%zmm14, %zmm4, %k1
	vpaddd	%zmm12, %zmm6, %zmm7 {%k1}
	vpcmpneqd	%zmm11, %zmm4, %k1
	vmovdqa64	%zmm15, %zmm4
	vpord	%zmm5, %zmm7, %zmm4 {%k1}
	vmovdqu64	%zmm4, (%rdx)
	addq	$1024, %rdx
	addq	$16, %rdi
	jne	.LBB4_10
	movl	$1, %edx
	testb	$1, %cl
	movl	$0, %ecx
	jne	.LBB4_9
	vmovdqu64	%zmm0, (%r15)
	vmovdqu64	%zmm1, 64(%r15)
	vmovdqu64	%zmm2, 128(%r15)
	vmovdqu64	%zmm3, 192(%r15)
	movq	%rbp, %r12
	shlq	$16, %r12
	addq	40(%rsp), %r12
	movq	%rbx, %rcx
	addq	$192, %rcx
	movb	$1, %dl
	xorl	%esi, %esi
.LBB4_13:
	movq	%rsi, %rdi
	shlq	$15, %rdi
	addq	%r12, %rdi
	movq	%rsi, %r8
	shlq	$14, %r8
	addq	32(%rsp), %r8
	shlq	$17, %rsi
	addq	%rcx, %rsi
	xorl	%r9d, %r9d
.LBB4_14:
	movq	%r9, %r10
	shlq	$6, %r10
	vmovdqu64	28672(%rdi,%r10), %xmm23
	vmovdqu64	12288(%rdi,%r10), %xmm20
	vmovdqu64	20480(%rdi,%r10), %xmm25
	vpunpckldq	%xmm23, %xmm20, %xmm10
	vmovdqu64	4096(%rdi,%r10), %xmm30
	vpunpckldq	%xmm25, %xmm30, %xmm8
	vmovdqu64	24576(%rdi,%r10), %xmm17
	vpunpckldq	%xmm10, %xmm8, %xmm0
	vmovdqu64	8192(%rdi,%r10), %xmm16
	vpunpckldq	%xmm17, %xmm16, %xmm7
	vmovdqu	16384(%rdi,%r10), %xmm13
	vmovdqu	(%rdi,%r10), %xmm12
	vpunpckldq	%xmm13, %xmm12, %xmm6
	vpunpckldq	%xmm7, %xmm6, %xmm1
	vpunpckhdq	%xmm0, %xmm1, %xmm5
	vpunpckldq	%xmm0, %xmm1, %xmm0
	vinserti32x4	$1, %xmm5, %zmm0, %zmm0
	vmovdqu64	30720(%rdi,%r10), %xmm28
	vmovdqu64	14336(%rdi,%r10), %xmm29
	vpunpckldq	%xmm28, %xmm29, %xmm4
	vmovdqu64	22528(%rdi,%r10), %xmm31
	vmovdqu64	6144(%rdi,%r10), %xmm19
	vpunpckldq	%xmm31, %xmm19, %xmm3
	vpunpckldq	%xmm4, %xmm3, %xmm18
	vmovdqu	26624(%rdi,%r10), %xmm15
	vmovdqu	10240(%rdi,%r10), %xmm14
	vmovdqu	18432(%rdi,%r10), %xmm11
	vpunpckldq	%xmm15, %xmm14, %xmm2
	vmovdqu	2048(%rdi,%r10), %xmm9
	vpunpckldq	%xmm11, %xmm9, %xmm1
	vpunpckldq	%xmm2, %xmm1, %xmm21
	vpunpckhdq	%xmm18, %xmm21, %xmm22
	vpunpckldq	%xmm18, %xmm21, %xmm18
	vinserti32x4	$1, %xmm22, %zmm18, %zmm5
	vmovups	(%rdi,%r10), %ymm18
	vmovups	8192(%rdi,%r10), %ymm21
	vmovups	4096(%rdi,%r10), %ymm22
	vmovups	12288(%rdi,%r10), %ymm24
	vmovups	2048(%rdi,%r10), %ymm26
	vmovups	10240(%rdi,%r10), %ymm27
	vunpckhps	16384(%rdi,%r10), %ymm18, %ymm18
	vmovups	%ymm18, 208(%rsp)
	vunpckhps	24576(%rdi,%r10), %ymm21, %ymm18
	vmovups	%ymm18, 176(%rsp)
	vunpckhps	20480(%rdi,%r10), %ymm22, %ymm18
	vmovups	%ymm18, 272(%rsp)
	vunpckhps	28672(%rdi,%r10), %ymm24, %ymm18
	vmovups	%ymm18, 240(%rsp)
	vunpckhps	18432(%rdi,%r10), %ymm26, %ymm18
	vmovups	%ymm18, 144(%rsp)
	vunpckhps	26624(%rdi,%r10), %ymm27, %ymm18
	vmovups	%ymm18, 304(%rsp)
	vmovups	6144(%rdi,%r10), %ymm18
	vunpckhps	22528(%rdi,%r10), %ymm18, %ymm18
	vmovups	%ymm18, 96(%rsp)
	vmovups	14336(%rdi,%r10), %ymm18
	vunpckhps	30720(%rdi,%r10), %ymm18, %ymm18
	vmovups	%ymm18, 64(%rsp)
	vmovdqu64	(%rdi,%r10), %zmm26
	vmovdqu64	16384(%rdi,%r10), %zmm27
	vmovdqu64	8192(%rdi,%r10), %zmm18
	vmovdqu64	24576(%rdi,%r10), %zmm24
	vmovups	4096(%rdi,%r10), %zmm21
	vmovups	%zmm21, 464(%rsp)
	vmovups	20480(%rdi,%r10), %zmm22
	vmovups	%zmm22, 528(%rsp)
	vmovups	12288(%rdi,%r10), %zmm22
	vmovups	%zmm22, 656(%rsp)
	vmovups	28672(%rdi,%r10), %zmm22
	vmovups	%zmm22, 592(%rsp)
	vmovups	2048(%rdi,%r10), %zmm22
	vmovups	%zmm22, 784(%rsp)
	vmovups	18432(%rdi,%r10), %zmm22
	vmovups	%zmm22, 720(%rsp)
	vmovups	10240(%rdi,%r10), %zmm22
	vmovups	%zmm22, 976(%rsp)
	vmovups	26624(%rdi,%r10), %zmm22
	vmovups	%zmm22, 912(%rsp)
	vmovups	6144(%rdi,%r10), %zmm22
	vmovups	%zmm22, 1104(%rsp)
	vmovups	22528(%rdi,%r10), %zmm22
	vmovups	%zmm22, 1040(%rsp)
	vmovups	14336(%rdi,%r10), %zmm22
	vmovups	%zmm22, 1168(%rsp)
	vmovups	30720(%rdi,%r10), %zmm22
	vmovups	%zmm22, 848(%rsp)
	vmovdqa64	.LCPI4_18(%rip), %zmm22
	vpermt2d	%zmm5, %zmm22, %zmm0
	vmovdqu64	%zmm0, (%r15)
	vpunpckhdq	%xmm7, %xmm6, %xmm0
	vpunpckhdq	%xmm10, %xmm8, %xmm5
	vinserti32x4	$1, %xmm0, %zmm0, %zmm0
	vinserti32x4	$1, %xmm5, %zmm0, %zmm5
	vbroadcasti64x4	.LCPI4_19(%rip), %zmm10
	vpermt2d	%zmm5, %zmm10, %zmm0
	vpunpckhdq	%xmm2, %xmm1, %xmm1
	vpunpckhdq	%xmm4, %xmm3, %xmm2
	vinserti32x4	$1, %xmm1, %zmm0, %zmm1
	vinserti32x4	$1, %xmm2, %zmm0, %zmm2
	vpermt2d	%zmm2, %zmm10, %zmm1
	vmovdqa64	.LCPI4_20(%rip), %zmm6
	vpermt2d	%zmm1, %zmm6, %zmm0
	vmovdqu64	%zmm0, 64(%r15)
	vpunpckhdq	%xmm13, %xmm12, %xmm0
	vpunpckhdq	%xmm17, %xmm16, %xmm1
	vpunpckhdq	%xmm25, %xmm30, %xmm2
	vpunpckhdq	%xmm23, %xmm20, %xmm3
	vinserti128	$1, %xmm0, %ymm0, %ymm0
	vinserti128	$1, %xmm1, %ymm0, %ymm1
	vpunpckldq	%ymm1, %ymm0, %ymm4
	vextracti128	$1, %ymm4, %xmm4
	vinserti32x4	$2, %xmm4, %zmm0, %zmm4
	vinserti128	$1, %xmm2, %ymm0, %ymm2
	vinserti128	$1, %xmm3, %ymm0, %ymm3
	vpunpckldq	%ymm3, %ymm2, %ymm5
	vextracti128	$1, %ymm5, %xmm5
	vinserti32x4	$2, %xmm5, %zmm0, %zmm5
	vpermt2d	%zmm5, %zmm6, %zmm4
	vmovdqa64	%zmm6, %zmm12
	vpunpckhdq	%xmm11, %xmm9, %xmm5
	vpunpckhdq	%xmm15, %xmm14, %xmm6
	vpunpckhdq	%xmm31, %xmm19, %xmm7
	vpunpckhdq	%xmm28, %xmm29, %xmm8
	vinserti128	$1, %xmm5, %ymm0, %ymm5
	vinserti128	$1, %xmm6, %ymm0, %ymm6
	vpunpckldq	%ymm6, %ymm5, %ymm9
	vextracti128	$1, %ymm9, %xmm9
	vinserti32x4	$2, %xmm9, %zmm0, %zmm9
	vinserti128	$1, %xmm7, %ymm0, %ymm7
	vinserti128	$1, %xmm8, %ymm0, %ymm8
	vpunpckldq	%ymm8, %ymm7, %ymm11
	vextracti128	$1, %ymm11, %xmm11
	vinserti32x4	$2, %xmm11, %zmm0, %zmm11
	vpermt2d	%zmm11, %zmm12, %zmm9
	vmovdqa64	%zmm12, %zmm19
	vpermt2d	%zmm9, %zmm22, %zmm4
	vmovdqu64	%zmm4, 128(%r15)
	vpunpckhdq	%ymm1, %ymm0, %ymm0
	vinserti64x4	$1, %ymm0, %zmm0, %zmm0
	vpunpckhdq	%ymm3, %ymm2, %ymm1
	vinserti64x4	$1, %ymm1, %zmm0, %zmm2
	vbroadcasti64x4	.LCPI4_21(%rip), %zmm21
	vpermt2d	%zmm2, %zmm21, %zmm0
	vpunpckhdq	%ymm6, %ymm5, %ymm2
	vinserti64x4	$1, %ymm2, %zmm0, %zmm2
	vpunpckhdq	%ymm8, %ymm7, %ymm3
	vinserti64x4	$1, %ymm3, %zmm0, %zmm3
	vpermt2d	%zmm3, %zmm21, %zmm2
	vpermt2d	%zmm2, %zmm12, %zmm0
	vmovdqu64	%zmm0, 192(%r15)
	vbroadcasti32x4	.LCPI4_22(%rip), %zmm28
	vpunpckldq	%zmm27, %zmm26, %zmm16
	vpunpckhdq	%zmm27, %zmm26, %zmm0
	vmovdqu64	%zmm0, 400(%rsp)
	vmovdqa64	%zmm26, %zmm0
	vpermt2d	%zmm27, %zmm28, %zmm0
	vpunpckldq	%zmm24, %zmm18, %zmm25
	vpunpckhdq	%zmm24, %zmm18, %zmm1
	vmovdqu64	%zmm1, 336(%rsp)
	vpermt2d	%zmm24, %zmm28, %zmm18
	vmovdqu64	528(%rsp), %zmm1
	vmovdqu64	464(%rsp), %zmm2
	vpunpckldq	%zmm1, %zmm2, %zmm24
	vpunpckhdq	%zmm1, %zmm2, %zmm23
	vpermt2d	%zmm1, %zmm28, %zmm2
	vmovdqu64	656(%rsp), %zmm3
	vmovdqu64	592(%rsp), %zmm1
	vpunpckldq	%zmm1, %zmm3, %zmm22
	vpunpckhdq	%zmm1, %zmm3, %zmm27
	vpermt2d	%zmm1, %zmm28, %zmm3
	vpunpckldq	%zmm18, %zmm0, %zmm4
	vpunpckldq	%zmm3, %zmm2, %zmm5
	vpermt2d	%zmm5, %zmm12, %zmm4
	vmovdqu64	784(%rsp), %zmm5
	vmovdqu64	720(%rsp), %zmm1
	vpunpckldq	%zmm1, %zmm5, %zmm20
	vpunpckhdq	%zmm1, %zmm5, %zmm26
	vpermt2d	%zmm1, %zmm28, %zmm5
	vmovdqu64	976(%rsp), %zmm15
	vmovdqa64	%zmm15, %zmm6
	vmovdqu64	912(%rsp), %zmm31
	vpermt2d	%zmm31, %zmm28, %zmm6
	vmovdqu64	1104(%rsp), %zmm14
	vmovdqa64	%zmm14, %zmm7
	vmovdqu64	1040(%rsp), %zmm30
	vpermt2d	%zmm30, %zmm28, %zmm7
	vmovdqu64	848(%rsp), %zmm12
	vmovdqu64	1168(%rsp), %zmm1
	vpermi2d	%zmm12, %zmm1, %zmm28
	vpunpckldq	%zmm6, %zmm5, %zmm8
	vpunpckldq	%zmm28, %zmm7, %zmm9
	vmovdqa	.LCPI4_23(%rip), %ymm11
	vpermt2d	%zmm9, %zmm11, %zmm8
	vmovdqa64	.LCPI4_24(%rip), %zmm13
	vpermt2d	%zmm8, %zmm13, %zmm4
	vmovdqu64	%zmm4, 256(%r15)
	vbroadcasti128	.LCPI4_40(%rip), %ymm4
	vpermt2d	%zmm18, %zmm4, %zmm0
	vpermt2d	%zmm3, %zmm4, %zmm2
	vmovdqa64	%zmm10, %zmm13
	vpermt2d	%zmm2, %zmm10, %zmm0
	vpermt2d	%zmm6, %zmm4, %zmm5
	vpermt2d	%zmm28, %zmm4, %zmm7
	vpunpckldq	%zmm30, %zmm14, %zmm17
	vmovdqa64	%zmm14, %zmm29
	vpermt2d	%zmm7, %zmm10, %zmm5
	vpunpckldq	%zmm31, %zmm15, %zmm18
	vmovdqa64	%zmm31, %zmm10
	vmovdqa64	%zmm15, %zmm31
	vpermt2d	%zmm5, %zmm19, %zmm0
	vmovdqu64	%zmm0, 320(%r15)
	vinserti64x4	$1, 208(%rsp), %zmm0, %zmm0
	vinserti64x4	$1, 176(%rsp), %zmm0, %zmm2
	vbroadcasti32x4	.LCPI4_26(%rip), %zmm14
	vpunpckhdq	%zmm2, %zmm0, %zmm3
	vpermt2d	%zmm2, %zmm14, %zmm0
	vinserti64x4	$1, 272(%rsp), %zmm0, %zmm2
	vinserti64x4	$1, 240(%rsp), %zmm0, %zmm4
	vpunpckhdq	%zmm4, %zmm2, %zmm5
	vpermt2d	%zmm4, %zmm14, %zmm2
	vpermt2d	%zmm2, %zmm19, %zmm0
	vinserti64x4	$1, 144(%rsp), %zmm0, %zmm2
	vinserti64x4	$1, 304(%rsp), %zmm0, %zmm4
	vpunpckhdq	%zmm4, %zmm2, %zmm6
	vpermt2d	%zmm4, %zmm14, %zmm2
	vinserti64x4	$1, 96(%rsp), %zmm0, %zmm4
	vinserti64x4	$1, 64(%rsp), %zmm0, %zmm7
	vpunpckhdq	%zmm7, %zmm4, %zmm8
	vpermt2d	%zmm7, %zmm14, %zmm4
	vpermt2d	%zmm4, %zmm19, %zmm2
	vmovdqa64	.LCPI4_18(%rip), %zmm15
	vpermt2d	%zmm2, %zmm15, %zmm0
	vmovdqu64	%zmm0, 384(%r15)
	vpermt2d	%zmm5, %zmm21, %zmm3
	vpermt2d	%zmm8, %zmm21, %zmm6
	vpermt2d	%zmm6, %zmm19, %zmm3
	vmovdqa64	%zmm19, %zmm28
	vmovdqu64	%zmm3, 448(%r15)
	vextracti32x4	$2, %zmm22, %xmm0
	vextracti32x4	$2, %zmm24, %xmm2
	vpunpckldq	%xmm0, %xmm2, %xmm0
	vextracti32x4	$2, %zmm25, %xmm2
	vextracti32x4	$2, %zmm16, %xmm3
	vpunpckldq	%xmm2, %xmm3, %xmm4
	vpunpckhdq	%xmm0, %xmm4, %xmm5
	vpunpckldq	%xmm0, %xmm4, %xmm0
	vinserti32x4	$1, %xmm5, %zmm0, %zmm0
	vpunpckldq	%zmm12, %zmm1, %zmm8
	vextracti32x4	$2, %zmm8, %xmm4
	vextracti32x4	$2, %zmm17, %xmm5
	vpunpckldq	%xmm4, %xmm5, %xmm4
	vextracti32x4	$2, %zmm18, %xmm5
	vextracti32x4	$2, %zmm20, %xmm7
	vpunpckldq	%xmm5, %xmm7, %xmm6
	vpunpckhdq	%xmm4, %xmm6, %xmm9
	vpunpckldq	%xmm4, %xmm6, %xmm4
	vinserti32x4	$1, %xmm9, %zmm4, %zmm4
	vpermt2d	%zmm4, %zmm15, %zmm0
	vmovdqu64	%zmm0, 512(%r15)
	vpunpckhdq	%zmm10, %zmm31, %zmm6
	vpunpckhdq	%xmm2, %xmm3, %xmm0
	vmovdqa64	%zmm24, %zmm2
	vmovdqa	.LCPI4_27(%rip), %ymm3
	vmovdqa64	%zmm3, %zmm4
	vpermt2d	%zmm22, %zmm3, %zmm2
	vmovdqa	.LCPI4_28(%rip), %ymm9
	vpermt2d	%ymm2, %ymm9, %ymm0
	vinserti64x4	$1, %ymm0, %zmm0, %zmm0
	vpunpckhdq	%xmm5, %xmm7, %xmm2
	vmovdqa64	%zmm17, %zmm3
	vpermt2d	%zmm8, %zmm4, %zmm3
	vpermt2d	%ymm3, %ymm9, %ymm2
	vinserti64x4	$1, %ymm2, %zmm0, %zmm2
	vpermt2d	%zmm2, %zmm19, %zmm0
	vmovdqu64	%zmm0, 576(%r15)
	vpunpckhdq	%zmm30, %zmm29, %zmm4
	vmovdqu64	336(%rsp), %zmm29
	vmovdqu64	400(%rsp), %zmm19
	vpunpckldq	%zmm29, %zmm19, %zmm5
	vpunpckldq	%zmm27, %zmm23, %zmm0
	vpermt2d	%zmm0, %zmm28, %zmm5
	vpunpckhdq	%zmm12, %zmm1, %zmm2
	vshufi64x2	$170, %zmm19, %zmm19, %zmm0
	vshufi64x2	$170, %zmm29, %zmm29, %zmm3
	vpunpckhdq	%ymm3, %ymm0, %ymm0
	vinserti64x4	$1, %ymm0, %zmm0, %zmm0
	vshufi64x2	$170, %zmm23, %zmm23, %zmm3
	vshufi64x2	$170, %zmm27, %zmm27, %zmm7
	vpunpckhdq	%ymm7, %ymm3, %ymm3
	vinserti64x4	$1, %ymm3, %zmm0, %zmm3
	vpermt2d	%zmm3, %zmm21, %zmm0
	vshufi64x2	$170, %zmm26, %zmm26, %zmm3
	vshufi64x2	$170, %zmm6, %zmm6, %zmm7
	vpunpckhdq	%ymm7, %ymm3, %ymm3
	vshufi64x2	$170, %zmm4, %zmm4, %zmm7
	vshufi64x2	$170, %zmm2, %zmm2, %zmm9
	vpunpckhdq	%ymm9, %ymm7, %ymm7
	vinserti64x4	$1, %ymm3, %zmm0, %zmm3
	vinserti64x4	$1, %ymm7, %zmm0, %zmm7
	vpermt2d	%zmm7, %zmm21, %zmm3
	vmovdqa64	%zmm16, %zmm7
	vpermt2d	%zmm25, %zmm14, %zmm7
	vbroadcasti128	.LCPI4_41(%rip), %ymm9
	vmovdqa64	%zmm9, %zmm12
	vpermt2d	%zmm25, %zmm9, %zmm16
	vmovdqa64	%zmm24, %zmm9
	vpermt2d	%zmm22, %zmm14, %zmm9
	vpermt2d	%zmm22, %zmm12, %zmm24
	vpermt2d	%zmm24, %zmm13, %zmm16
	vmovdqa64	%zmm20, %zmm11
	vpermt2d	%zmm18, %zmm14, %zmm11
	vpermt2d	%zmm18, %zmm12, %zmm20
	vpermi2d	%zmm8, %zmm17, %zmm14
	vpermt2d	%zmm8, %zmm12, %zmm17
	vpermt2d	%zmm17, %zmm13, %zmm20
	vpunpckhdq	%zmm29, %zmm19, %zmm8
	vpunpckhdq	%zmm27, %zmm23, %zmm10
	vpermt2d	%zmm10, %zmm21, %zmm8
	vpunpckhdq	%zmm6, %zmm26, %zmm10
	vpunpckhdq	%zmm2, %zmm4, %zmm12
	vpermt2d	%zmm12, %zmm21, %zmm10
	vpunpckldq	%zmm6, %zmm26, %zmm1
	vpunpckldq	%zmm2, %zmm4, %zmm12
	vpermt2d	%zmm12, %zmm28, %zmm1
	vpermt2d	%zmm1, %zmm15, %zmm5
	vmovdqu64	%zmm5, 640(%r15)
	vpermt2d	%zmm3, %zmm28, %zmm0
	vmovdqu64	%zmm0, 704(%r15)
	vmovdqa	.LCPI4_29(%rip), %ymm0
	vpermt2d	%ymm9, %ymm0, %ymm7
	vmovaps	.LCPI4_30(%rip), %ymm0
	vpermt2ps	%ymm14, %ymm0, %ymm11
	vmovaps	.LCPI4_24(%rip), %zmm0
	vpermt2ps	%zmm11, %zmm0, %zmm7
	vmovups	%zmm7, 768(%r15)
	vpermt2d	%zmm20, %zmm28, %zmm16
	vmovdqu64	%zmm16, 832(%r15)
	vmovdqa64	%zmm19, %zmm25
	vmovdqa64	.LCPI4_32(%rip), %zmm0
	vpermt2d	%zmm29, %zmm0, %zmm25
	vpermt2d	%zmm27, %zmm0, %zmm23
	vpermt2d	%zmm23, %zmm28, %zmm25
	vpermt2d	%zmm6, %zmm0, %zmm26
	vpermt2d	%zmm2, %zmm0, %zmm4
	vpermt2d	%zmm4, %zmm28, %zmm26
	vpermt2d	%zmm26, %zmm15, %zmm25
	vmovdqu64	%zmm25, 896(%r15)
	vpermt2d	%zmm10, %zmm28, %zmm8
	vmovdqu64	%zmm8, 960(%r15)
	movq	%r9, %r10
	shlq	$9, %r10
	addq	%r8, %r10
	xorl	%r11d, %r11d
	xorl	%eax, %eax
	vmovdqa64	.LCPI4_33(%rip), %zmm4
	vmovdqa64	.LCPI4_34(%rip), %zmm5
	.p2align	4
.LBB4_15:
	movl	%eax, %r14d
	shrl	%r14d
	shlq	$6, %r14
	vmovups	(%r10,%r14), %zmm0
	vmovdqu64	(%r15,%r11), %zmm1
	vpsrld	$4, %zmm1, %zmm2
	vpermd	%zmm4, %zmm2, %zmm2
	vmulps	%zmm2, %zmm0, %zmm2
	vpermd	%zmm4, %zmm1, %zmm3
	vmulps	%zmm3, %zmm0, %zmm3
	vpermt2w	%zmm2, %zmm5, %zmm3
	vmovdqu64	%zmm3, -192(%rsi,%r11,4)
	vpsrld	$12, %zmm1, %zmm2
	vpermd	%zmm4, %zmm2, %zmm2
	vmulps	%zmm2, %zmm0, %zmm2
	vpsrld	$8, %zmm1, %zmm3
	vpermd	%zmm4, %zmm3, %zmm3
	vmulps	%zmm3, %zmm0, %zmm3
	vpermt2w	%zmm2, %zmm5, %zmm3
	vmovdqu64	%zmm3, -128(%rsi,%r11,4)
	vpsrld	$20, %zmm1, %zmm2
	vpermd	%zmm4, %zmm2, %zmm2
	vmulps	%zmm2, %zmm0, %zmm2
	vpsrld	$16, %zmm1, %zmm3
	vpermd	%zmm4, %zmm3, %zmm3
	vmulps	%zmm3, %zmm0, %zmm3
	vpermt2w	%zmm2, %zmm5, %zmm3
	vmovdqu64	%zmm3, -64(%rsi,%r11,4)
	vpsrld	$28, %zmm1, %zmm2
	vpermd	%zmm4, %zmm2, %zmm2
	vmulps	%zmm2, %zmm0, %zmm2
	vpsrld	$24, %zmm1, %zmm1
	vpermd	%zmm4, %zmm1, %zmm1
	vmulps	%zmm1, %zmm0, %zmm0
	vpermt2w	%zmm2, %zmm5, %zmm0
	vmovdqu64	%zmm0, (%rsi,%r11,4)
	incq	%rax
	addq	$64, %r11
	cmpq	$16, %rax
	jne	.LBB4_15
	incq	%r9
	addq	$4096, %rsi
	cmpq	$32, %r9
	jne	.LBB4_14
	movl	$1, %esi
	testb	$1, %dl
	movl	$0, %edx
	jne	.LBB4_13
	cmpq	$0, 56(%rsp)
	jle	.LBB4_39
	movq	%rbp, %r12
	shlq	$5, %r12
	movq	%rbp, %rax
	shlq	$6, %rax
	addq	136(%rsp), %rax
	movq	%rax, 64(%rsp)
	movq	128(%rsp), %r14
	movq	$0, 144(%rsp)
.LBB4_20:
	movq	144(%rsp), %rax
	shlq	$15, %rax
	movq	%rax, 96(%rsp)
	movl	$1024, %edx
	movq	%r15, %rdi
	xorl	%esi, %esi
	vzeroupper
	callq	memset@PLT
	vpxor	%xmm15, %xmm15, %xmm15
	xorl	%eax, %eax
	vxorps	%xmm14, %xmm14, %xmm14
	vpxor	%xmm13, %xmm13, %xmm13
	vpxor	%xmm12, %xmm12, %xmm12
	vxorps	%xmm11, %xmm11, %xmm11
	vpxor	%xmm10, %xmm10, %xmm10
	vpxor	%xmm9, %xmm9, %xmm9
	vpxor	%xmm8, %xmm8, %xmm8
	vxorps	%xmm7, %xmm7, %xmm7
	vpxor	%xmm6, %xmm6, %xmm6
	vpxor	%xmm5, %xmm5, %xmm5
	vpxor	%xmm4, %xmm4, %xmm4
	vpxor	%xmm3, %xmm3, %xmm3
	vxorps	%xmm2, %xmm2, %xmm2
	vxorps	%xmm1, %xmm1, %xmm1
	vpxor	%xmm0, %xmm0, %xmm0
.LBB4_21:
	vbroadcastss	-252(%r14,%rax), %zmm19
	vmovups	(%rbx,%rax,2), %zmm20
	vmovups	64(%rbx,%rax,2), %zmm18
	vmovups	128(%rbx,%rax,2), %zmm17
	vmovups	192(%rbx,%rax,2), %zmm16
	vdpbf16ps	%zmm20, %zmm19, %zmm15
	vmovups	131072(%rbx,%rax,2), %zmm21
	vdpbf16ps	%zmm21, %zmm19, %zmm14
	vbroadcastss	-248(%r14,%rax), %zmm19
	vdpbf16ps	%zmm20, %zmm19, %zmm13
	vbroadcastss	-244(%r14,%rax), %zmm22
	vdpbf16ps	%zmm21, %zmm19, %zmm12
	vdpbf16ps	%zmm20, %zmm22, %zmm11
	vdpbf16ps	%zmm21, %zmm22, %zmm10
	vbroadcastss	-240(%r14,%rax), %zmm19
	vdpbf16ps	%zmm20, %zmm19, %zmm9
	vdpbf16ps	%zmm21, %zmm19, %zmm8
	vbroadcastss	-236(%r14,%rax), %zmm19
	vdpbf16ps	%zmm20, %zmm19, %zmm7
	vbroadcastss	-232(%r14,%rax), %zmm22
	vdpbf16ps	%zmm21, %zmm19, %zmm6
	vdpbf16ps	%zmm20, %zmm22, %zmm5
	vdpbf16ps	%zmm21, %zmm22, %zmm4
	vbroadcastss	-228(%r14,%rax), %zmm19
	vdpbf16ps	%zmm20, %zmm19, %zmm3
	vdpbf16ps	%zmm21, %zmm19, %zmm2
	vbroadcastss	-224(%r14,%rax), %zmm19
	vdpbf16ps	%zmm20, %zmm19, %zmm1
	vbroadcastss	-220(%r14,%rax), %zmm20
	vdpbf16ps	%zmm21, %zmm19, %zmm0
	vdpbf16ps	%zmm18, %zmm20, %zmm15
	vmovups	131136(%rbx,%rax,2), %zmm19
	vbroadcastss	-216(%r14,%rax), %zmm21
	vdpbf16ps	%zmm19, %zmm20, %zmm14
	vdpbf16ps	%zmm18, %zmm21, %zmm13
	vdpbf16ps	%zmm19, %zmm21, %zmm12
	vbroadcastss	-212(%r14,%rax), %zmm20
	vdpbf16ps	%zmm18, %zmm20, %zmm11
	vdpbf16ps	%zmm19, %zmm20, %zmm10
	vbroadcastss	-208(%r14,%rax), %zmm20
	vdpbf16ps	%zmm18, %zmm20, %zmm9
	vbroadcastss	-204(%r14,%rax), %zmm21
	vdpbf16ps	%zmm19, %zmm20, %zmm8
	vdpbf16ps	%zmm18, %zmm21, %zmm7
	vdpbf16ps	%zmm19, %zmm21, %zmm6
	vbroadcastss	-200(%r14,%rax), %zmm20
	vdpbf16ps	%zmm18, %zmm20, %zmm5
	vdpbf16ps	%zmm19, %zmm20, %zmm4
	vbroadcastss	-196(%r14,%rax), %zmm20
	vdpbf16ps	%zmm18, %zmm20, %zmm3
	vbroadcastss	-192(%r14,%rax), %zmm21
	vdpbf16ps	%zmm19, %zmm20, %zmm2
	vdpbf16ps	%zmm18, %zmm21, %zmm1
	vbroadcastss	-188(%r14,%rax), %zmm18
	vmovups	131200(%rbx,%rax,2), %zmm20
	vdpbf16ps	%zmm19, %zmm21, %zmm0
	vdpbf16ps	%zmm17, %zmm18, %zmm15
	vdpbf16ps	%zmm20, %zmm18, %zmm14
	vbroadcastss	-184(%r14,%rax), %zmm18
	vdpbf16ps	%zmm17, %zmm18, %zmm13
	vdpbf16ps	%zmm20, %zmm18, %zmm12
	vbroadcastss	-180(%r14,%rax), %zmm18
	vdpbf16ps	%zmm17, %zmm18, %zmm11
	vbroadcastss	-176(%r14,%rax), %zmm19
	vdpbf16ps	%zmm20, %zmm18, %zmm10
	vdpbf16ps	%zmm17, %zmm19, %zmm9
	vdpbf16ps	%zmm20, %zmm19, %zmm8
	vbroadcastss	-172(%r14,%rax), %zmm18
	vdpbf16ps	%zmm17, %zmm18, %zmm7
	vdpbf16ps	%zmm20, %zmm18, %zmm6
	vbroadcastss	-168(%r14,%rax), %zmm18
	vdpbf16ps	%zmm17, %zmm18, %zmm5
	vbroadcastss	-164(%r14,%rax), %zmm19
	vdpbf16ps	%zmm20, %zmm18, %zmm4
	vdpbf16ps	%zmm17, %zmm19, %zmm3
	vdpbf16ps	%zmm20, %zmm19, %zmm2
	vbroadcastss	-160(%r14,%rax), %zmm18
	vdpbf16ps	%zmm17, %zmm18, %zmm1
	vdpbf16ps	%zmm20, %zmm18, %zmm0
	vbroadcastss	-156(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm15
	vmovups	131264(%rbx,%rax,2), %zmm18
	vdpbf16ps	%zmm18, %zmm17, %zmm14
	vbroadcastss	-152(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm13
	vbroadcastss	-148(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm12
	vdpbf16ps	%zmm16, %zmm19, %zmm11
	vdpbf16ps	%zmm18, %zmm19, %zmm10
	vbroadcastss	-144(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm9
	vdpbf16ps	%zmm18, %zmm17, %zmm8
	vbroadcastss	-140(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm7
	vbroadcastss	-136(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm6
	vdpbf16ps	%zmm16, %zmm19, %zmm5
	vdpbf16ps	%zmm18, %zmm19, %zmm4
	vbroadcastss	-132(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm3
	vdpbf16ps	%zmm18, %zmm17, %zmm2
	vbroadcastss	-128(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm1
	vmovups	256(%rbx,%rax,2), %zmm16
	vdpbf16ps	%zmm18, %zmm17, %zmm0
	vbroadcastss	-124(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm15
	vmovups	131328(%rbx,%rax,2), %zmm18
	vdpbf16ps	%zmm18, %zmm17, %zmm14
	vbroadcastss	-120(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm13
	vbroadcastss	-116(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm12
	vdpbf16ps	%zmm16, %zmm19, %zmm11
	vdpbf16ps	%zmm18, %zmm19, %zmm10
	vbroadcastss	-112(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm9
	vdpbf16ps	%zmm18, %zmm17, %zmm8
	vbroadcastss	-108(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm7
	vbroadcastss	-104(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm6
	vdpbf16ps	%zmm16, %zmm19, %zmm5
	vdpbf16ps	%zmm18, %zmm19, %zmm4
	vbroadcastss	-100(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm3
	vdpbf16ps	%zmm18, %zmm17, %zmm2
	vbroadcastss	-96(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm1
	vmovups	320(%rbx,%rax,2), %zmm16
	vdpbf16ps	%zmm18, %zmm17, %zmm0
	vbroadcastss	-92(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm15
	vmovups	131392(%rbx,%rax,2), %zmm18
	vdpbf16ps	%zmm18, %zmm17, %zmm14
	vbroadcastss	-88(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm13
	vbroadcastss	-84(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm12
	vdpbf16ps	%zmm16, %zmm19, %zmm11
	vdpbf16ps	%zmm18, %zmm19, %zmm10
	vbroadcastss	-80(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm9
	vdpbf16ps	%zmm18, %zmm17, %zmm8
	vbroadcastss	-76(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm7
	vbroadcastss	-72(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm6
	vdpbf16ps	%zmm16, %zmm19, %zmm5
	vdpbf16ps	%zmm18, %zmm19, %zmm4
	vbroadcastss	-68(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm3
	vdpbf16ps	%zmm18, %zmm17, %zmm2
	vbroadcastss	-64(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm1
	vmovups	384(%rbx,%rax,2), %zmm16
	vdpbf16ps	%zmm18, %zmm17, %zmm0
	vbroadcastss	-60(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm15
	vmovups	131456(%rbx,%rax,2), %zmm18
	vdpbf16ps	%zmm18, %zmm17, %zmm14
	vbroadcastss	-56(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm13
	vbroadcastss	-52(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm12
	vdpbf16ps	%zmm16, %zmm19, %zmm11
	vdpbf16ps	%zmm18, %zmm19, %zmm10
	vbroadcastss	-48(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm9
	vdpbf16ps	%zmm18, %zmm17, %zmm8
	vbroadcastss	-44(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm7
	vbroadcastss	-40(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm6
	vdpbf16ps	%zmm16, %zmm19, %zmm5
	vdpbf16ps	%zmm18, %zmm19, %zmm4
	vbroadcastss	-36(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm3
	vdpbf16ps	%zmm18, %zmm17, %zmm2
	vbroadcastss	-32(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm1
	vmovups	448(%rbx,%rax,2), %zmm16
	vdpbf16ps	%zmm18, %zmm17, %zmm0
	vbroadcastss	-28(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm15
	vmovups	131520(%rbx,%rax,2), %zmm18
	vdpbf16ps	%zmm18, %zmm17, %zmm14
	vbroadcastss	-24(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm13
	vbroadcastss	-20(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm12
	vdpbf16ps	%zmm16, %zmm19, %zmm11
	vdpbf16ps	%zmm18, %zmm19, %zmm10
	vbroadcastss	-16(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm9
	vdpbf16ps	%zmm18, %zmm17, %zmm8
	vbroadcastss	-12(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm7
	vbroadcastss	-8(%r14,%rax), %zmm19
	vdpbf16ps	%zmm18, %zmm17, %zmm6
	vdpbf16ps	%zmm16, %zmm19, %zmm5
	vdpbf16ps	%zmm18, %zmm19, %zmm4
	vbroadcastss	-4(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm3
	vdpbf16ps	%zmm18, %zmm17, %zmm2
	vbroadcastss	(%r14,%rax), %zmm17
	vdpbf16ps	%zmm16, %zmm17, %zmm1
	vdpbf16ps	%zmm18, %zmm17, %zmm0
	addq	$256, %rax
	cmpq	$65536, %rax
	jne	.LBB4_21
	vmovups	%zmm15, (%r15)
	vmovups	%zmm14, 64(%r15)
	vmovups	%zmm13, 128(%r15)
	vmovups	%zmm12, 192(%r15)
	vmovups	%zmm11, 256(%r15)
	vmovups	%zmm10, 320(%r15)
	vmovups	%zmm9, 384(%r15)
	vmovups	%zmm8, 448(%r15)
	vmovups	%zmm7, 512(%r15)
	vmovups	%zmm6, 576(%r15)
	vmovups	%zmm5, 640(%r15)
	vmovups	%zmm4, 704(%r15)
	vmovups	%zmm3, 768(%r15)
	vmovups	%zmm2, 832(%r15)
	vmovups	%zmm1, 896(%r15)
	vmovups	%zmm0, 960(%r15)
	movq	144(%rsp), %rax
	leaq	(,%rax,8), %rax
	cmpq	24(%rsp), %rax
	jge	.LBB4_24
	movq	16(%rsp), %rcx
	vbroadcastss	(%rcx), %zmm16
	movq	8(%rsp), %rcx
	vfmadd213ps	(%rcx,%r12,4), %zmm16, %zmm15
	vpsrld	$16, %zmm15, %zmm17
	vpbroadcastd	.LCPI4_35(%rip), %zmm19
	vpandd	%zmm19, %zmm17, %zmm17
	vpbroadcastd	.LCPI4_36(%rip), %zmm20
	vpaddd	%zmm20, %zmm15, %zmm18
	vpaddd	%zmm17, %zmm18, %zmm17
	vpbroadcastd	.LCPI4_37(%rip), %zmm18
	vpandd	%zmm18, %zmm15, %zmm15
	vpbroadcastd	.LCPI4_38(%rip), %zmm21
	vpcmpgtd	%zmm15, %zmm21, %k1
	vpbroadcastd	.LCPI4_39(%rip), %zmm22
	vmovdqa64	%zmm22, %zmm15
	vpsrld	$16, %zmm17, %zmm15 {%k1}
	movq	64(%rsp), %rdx
	movq	96(%rsp), %rsi
	vpmovdw	%zmm15, (%rdx,%rsi,2)
	vfmadd213ps	64(%rcx,%r12,4), %zmm16, %zmm14
	vpsrld	$16, %zmm14, %zmm15
	vpandd	%zmm19, %zmm15, %zmm15
	vpaddd	%zmm20, %zmm14, %zmm16
	vpaddd	%zmm15, %zmm16, %zmm15
	vpandd	%zmm18, %zmm14, %zmm14
	vpcmpgtd	%zmm14, %zmm21, %k1
	vmovdqa64	%zmm22, %zmm14
	vpsrld	$16, %zmm15, %zmm14 {%k1}
	vpmovdw	%zmm14, 32(%rdx,%rsi,2)
.LBB4_24:
	movq	%rax, %rcx
	orq	$1, %rcx
	cmpq	24(%rsp), %rcx
	jge	.LBB4_26
	movq	16(%rsp), %rcx
	vbroadcastss	(%rcx), %zmm14
	movq	8(%rsp), %rcx
	vfmadd213ps	(%rcx,%r12,4), %zmm14, %zmm13
	vpsrld	$16, %zmm13, %zmm15
	vpbroadcastd	.LCPI4_35(%rip), %zmm17
	vpandd	%zmm17, %zmm15, %zmm15
	vpbroadcastd	.LCPI4_36(%rip), %zmm18
	vpaddd	%zmm18, %zmm13, %zmm16
	vpaddd	%zmm15, %zmm16, %zmm15
	vpbroadcastd	.LCPI4_37(%rip), %zmm16
	vpandd	%zmm16, %zmm13, %zmm13
	vpbroadcastd	.LCPI4_38(%rip), %zmm19
	vpcmpgtd	%zmm13, %zmm19, %k1
	vpbroadcastd	.LCPI4_39(%rip), %zmm20
	vmovdqa64	%zmm20, %zmm13
	vpsrld	$16, %zmm15, %zmm13 {%k1}
	movq	64(%rsp), %rdx
	movq	96(%rsp), %rsi
	vpmovdw	%zmm13, 8192(%rdx,%rsi,2)
	vfmadd213ps	64(%rcx,%r12,4), %zmm14, %zmm12
	vpsrld	$16, %zmm12, %zmm13
	vpandd	%zmm17, %zmm13, %zmm13
	vpaddd	%zmm18, %zmm12, %zmm14
	vpaddd	%zmm13, %zmm14, %zmm13
	vpandd	%zmm16, %zmm12, %zmm12
	vpcmpgtd	%zmm12, %zmm19, %k1
	vmovdqa64	%zmm20, %zmm12
	vpsrld	$16, %zmm13, %zmm12 {%k1}
	vpmovdw	%zmm12, 8224(%rdx,%rsi,2)
.LBB4_26:
	movq	%rax, %rcx
	orq	$2, %rcx
	cmpq	24(%rsp), %rcx
	jge	.LBB4_28
	movq	16(%rsp), %rcx
	vbroadcastss	(%rcx), %zmm12
	movq	8(%rsp), %rcx
	vfmadd213ps	(%rcx,%r12,4), %zmm12, %zmm11
	vpsrld	$16, %zmm11, %zmm13
	vpbroadcastd	.LCPI4_35(%rip), %zmm15
	vpandd	%zmm15, %zmm13, %zmm13
	vpbroadcastd	.LCPI4_36(%rip), %zmm16
	vpaddd	%zmm16, %zmm11, %zmm14
	vpaddd	%zmm13, %zmm14, %zmm13
	vpbroadcastd	.LCPI4_37(%rip), %zmm14
	vpandd	%zmm14, %zmm11, %zmm11
	vpbroadcastd	.LCPI4_38(%rip), %zmm17
	vpcmpgtd	%zmm11, %zmm17, %k1
	vpbroadcastd	.LCPI4_39(%rip), %zmm18
	vmovdqa64	%zmm18, %zmm11
	vpsrld	$16, %zmm13, %zmm11 {%k1}
	movq	64(%rsp), %rdx
	movq	96(%rsp), %rsi
	vpmovdw	%zmm11, 16384(%rdx,%rsi,2)
	vfmadd213ps	64(%rcx,%r12,4), %zmm12, %zmm10
	vpsrld	$16, %zmm10, %zmm11
	vpandd	%zmm15, %zmm11, %zmm11
	vpaddd	%zmm16, %zmm10, %zmm12
	vpaddd	%zmm11, %zmm12, %zmm11
	vpandd	%zmm14, %zmm10, %zmm10
	vpcmpgtd	%zmm10, %zmm17, %k1
	vmovdqa64	%zmm18, %zmm10
	vpsrld	$16, %zmm11, %zmm10 {%k1}
	vpmovdw	%zmm10, 16416(%rdx,%rsi,2)
.LBB4_28:
	movq	%rax, %rcx
	orq	$3, %rcx
	cmpq	24(%rsp), %rcx
	jge	.LBB4_30
	movq	16(%rsp), %rcx
	vbroadcastss	(%rcx), %zmm10
	movq	8(%rsp), %rcx
	vfmadd213ps	(%rcx,%r12,4), %zmm10, %zmm9
	vpsrld	$16, %zmm9, %zmm11
	vpbroadcastd	.LCPI4_35(%rip), %zmm13
	vpandd	%zmm13, %zmm11, %zmm11
	vpbroadcastd	.LCPI4_36(%rip), %zmm14
	vpaddd	%zmm14, %zmm9, %zmm12
	vpaddd	%zmm11, %zmm12, %zmm11
	vpbroadcastd	.LCPI4_37(%rip), %zmm12
	vpandd	%zmm12, %zmm9, %zmm9
	vpbroadcastd	.LCPI4_38(%rip), %zmm15
	vpcmpgtd	%zmm9, %zmm15, %k1
	vpbroadcastd	.LCPI4_39(%rip), %zmm16
	vmovdqa64	%zmm16, %zmm9
	vpsrld	$16, %zmm11, %zmm9 {%k1}
	movq	64(%rsp), %rdx
	movq	96(%rsp), %rsi
	vpmovdw	%zmm9, 24576(%rdx,%rsi,2)
	vfmadd213ps	64(%rcx,%r12,4), %zmm10, %zmm8
	vpsrld	$16, %zmm8, %zmm9
	vpandd	%zmm13, %zmm9, %zmm9
	vpaddd	%zmm14, %zmm8, %zmm10
	vpaddd	%zmm9, %zmm10, %zmm9
	vpandd	%zmm12, %zmm8, %zmm8
	vpcmpgtd	%zmm8, %zmm15, %k1
	vmovdqa64	%zmm16, %zmm8
	vpsrld	$16, %zmm9, %zmm8 {%k1}
	vpmovdw	%zmm8, 24608(%rdx,%rsi,2)
.LBB4_30:
	movq	%rax, %rcx
	orq	$4, %rcx
	cmpq	24(%rsp), %rcx
	jge	.LBB4_32
	movq	16(%rsp), %rcx
	vbroadcastss	(%rcx), %zmm8
	movq	8(%rsp), %rcx
	vfmadd213ps	(%rcx,%r12,4), %zmm8, %zmm7
	vpsrld	$16, %zmm7, %zmm9
	vpbroadcastd	.LCPI4_35(%rip), %zmm11
	vpandd	%zmm11, %zmm9, %zmm9
	vpbroadcastd	.LCPI4_36(%rip), %zmm12
	vpaddd	%zmm12, %zmm7, %zmm10
	vpaddd	%zmm9, %zmm10, %zmm9
	vpbroadcastd	.LCPI4_37(%rip), %zmm10
	vpandd	%zmm10, %zmm7, %zmm7
	vpbroadcastd	.LCPI4_38(%rip), %zmm13
	vpcmpgtd	%zmm7, %zmm13, %k1
	vpbroadcastd	.LCPI4_39(%rip), %zmm14
	vmovdqa64	%zmm14, %zmm7
	vpsrld	$16, %zmm9, %zmm7 {%k1}
	movq	64(%rsp), %rdx
	movq	96(%rsp), %rsi
	vpmovdw	%zmm7, 32768(%rdx,%rsi,2)
	vfmadd213ps	64(%rcx,%r12,4), %zmm8, %zmm6
	vpsrld	$16, %zmm6, %zmm7
	vpandd	%zmm11, %zmm7, %zmm7
	vpaddd	%zmm12, %zmm6, %zmm8
	vpaddd	%zmm7, %zmm8, %zmm7
	vpandd	%zmm10, %zmm6, %zmm6
	vpcmpgtd	%zmm6, %zmm13, %k1
	vmovdqa64	%zmm14, %zmm6
	vpsrld	$16, %zmm7, %zmm6 {%k1}
	vpmovdw	%zmm6, 32800(%rdx,%rsi,2)
.LBB4_32:
	movq	%rax, %rcx
	orq	$5, %rcx
	cmpq	24(%rsp), %rcx
	jge	.LBB4_34
	movq	16(%rsp), %rcx
	vbroadcastss	(%rcx), %zmm6
	movq	8(%rsp), %rcx
	vfmadd213ps	(%rcx,%r12,4), %zmm6, %zmm5
	vpsrld	$16, %zmm5, %zmm7
	vpbroadcastd	.LCPI4_35(%rip), %zmm9
	vpandd	%zmm9, %zmm7, %zmm7
	vpbroadcastd	.LCPI4_36(%rip), %zmm10
	vpaddd	%zmm10, %zmm5, %zmm8
	vpaddd	%zmm7, %zmm8, %zmm7
	vpbroadcastd	.LCPI4_37(%rip), %zmm8
	vpandd	%zmm8, %zmm5, %zmm5
	vpbroadcastd	.LCPI4_38(%rip), %zmm11
	vpcmpgtd	%zmm5, %zmm11, %k1
	vpbroadcastd	.LCPI4_39(%rip), %zmm12
	vmovdqa64	%zmm12, %zmm5
	vpsrld	$16, %zmm7, %zmm5 {%k1}
	movq	64(%rsp), %rdx
	movq	96(%rsp), %rsi
	vpmovdw	%zmm5, 40960(%rdx,%rsi,2)
	vfmadd213ps	64(%rcx,%r12,4), %zmm6, %zmm4
	vpsrld	$16, %zmm4, %zmm5
	vpandd	%zmm9, %zmm5, %zmm5
	vpaddd	%zmm10, %zmm4, %zmm6
	vpaddd	%zmm5, %zmm6, %zmm5
	vpandd	%zmm8, %zmm4, %zmm4
	vpcmpgtd	%zmm4, %zmm11, %k1
	vmovdqa64	%zmm12, %zmm4
	vpsrld	$16, %zmm5, %zmm4 {%k1}
	vpmovdw	%zmm4, 40992(%rdx,%rsi,2)
.LBB4_34:
	movq	%rax, %rcx
	orq	$6, %rcx
	cmpq	24(%rsp), %rcx
	jge	.LBB4_36
	movq	16(%rsp), %rcx
	vbroadcastss	(%rcx), %zmm4
	movq	8(%rsp), %rcx
	vfmadd213ps	(%rcx,%r12,4), %zmm4, %zmm3
	vpsrld	$16, %zmm3, %zmm5
	vpbroadcastd	.LCPI4_35(%rip), %zmm7
	vpandd	%zmm7, %zmm5, %zmm5
	vpbroadcastd	.LCPI4_36(%rip), %zmm8
	vpaddd	%zmm8, %zmm3, %zmm6
	vpaddd	%zmm5, %zmm6, %zmm5
	vpbroadcastd	.LCPI4_37(%rip), %zmm6
	vpandd	%zmm6, %zmm3, %zmm3
	vpbroadcastd	.LCPI4_38(%rip), %zmm9
	vpcmpgtd	%zmm3, %zmm9, %k1
	vpbroadcastd	.LCPI4_39(%rip), %zmm10
	vmovdqa64	%zmm10, %zmm3
	vpsrld	$16, %zmm5, %zmm3 {%k1}
	movq	64(%rsp), %rdx
	movq	96(%rsp), %rsi
	vpmovdw	%zmm3, 49152(%rdx,%rsi,2)
	vfmadd213ps	64(%rcx,%r12,4), %zmm4, %zmm2
	vpsrld	$16, %zmm2, %zmm3
	vpandd	%zmm7, %zmm3, %zmm3
	vpaddd	%zmm8, %zmm2, %zmm4
	vpaddd	%zmm3, %zmm4, %zmm3
	vpandd	%zmm6, %zmm2, %zmm2
	vpcmpgtd	%zmm2, %zmm9, %k1
	vmovdqa64	%zmm10, %zmm2
	vpsrld	$16, %zmm3, %zmm2 {%k1}
	vpmovdw	%zmm2, 49184(%rdx,%rsi,2)
.LBB4_36:
	orq	$7, %rax
	cmpq	24(%rsp), %rax
	jge	.LBB4_38
	movq	16(%rsp), %rax
	vbroadcastss	(%rax), %zmm2
	movq	8(%rsp), %rax
	vfmadd213ps	(%rax,%r12,4), %zmm2, %zmm1
	vpsrld	$16, %zmm1, %zmm3
	vpbroadcastd	.LCPI4_35(%rip), %zmm5
	vpandd	%zmm5, %zmm3, %zmm3
	vpbroadcastd	.LCPI4_36(%rip), %zmm6
	vpaddd	%zmm6, %zmm1, %zmm4
	vpaddd	%zmm3, %zmm4, %zmm3
	vpbroadcastd	.LCPI4_37(%rip), %zmm4
	vpandd	%zmm4, %zmm1, %zmm1
	vpbroadcastd	.LCPI4_38(%rip), %zmm7
	vpcmpgtd	%zmm1, %zmm7, %k1
	vpbroadcastd	.LCPI4_39(%rip), %zmm8
	vmovdqa64	%zmm8, %zmm1
	vpsrld	$16, %zmm3, %zmm1 {%k1}
	movq	64(%rsp), %rcx
	movq	96(%rsp), %rdx
	vpmovdw	%zmm1, 57344(%rcx,%rdx,2)
	vfmadd213ps	64(%rax,%r12,4), %zmm2, %zmm0
	vpsrld	$16, %zmm0, %zmm1
	vpandd	%zmm5, %zmm1, %zmm1
	vpaddd	%zmm6, %zmm0, %zmm2
	vpaddd	%zmm1, %zmm2, %zmm1
	vpandd	%zmm4, %zmm0, %zmm0
	vpcmpgtd	%zmm0, %zmm7, %k1
	vmovdqa64	%zmm8, %zmm0
	vpsrld	$16, %zmm1, %zmm0 {%k1}
	vpmovdw	%zmm0, 57376(%rcx,%rdx,2)
.LBB4_38:
	movq	144(%rsp), %rcx
	incq	%rcx
	addq	$65536, %r14
	movq	%rcx, 144(%rsp)
	cmpq	56(%rsp), %rcx
	jne	.LBB4_20
.LBB4_39:
	movl	$1, %edi
	movl	4(%rsp), %esi
	movq	%rbx, %rdx
	movq	__TVMBackendFreeWorkspace@GOTPCREL(%rip), %rax
	vzeroupper
	callq	*(%rax)
	testl	%eax, %eax
	jne	.LBB4_45
	movl	$1, %edi
	movl	4(%rsp), %esi
	movq	%r15, %rdx
	movq	__TVMBackendFreeWorkspace@GOTPCREL(%rip), %rax
	callq	*(%rax)
	testl	%eax, %eax
	jne	.LBB4_45
	movl	$1, %edi
	movl	4(%rsp), %ebx
	movl	%ebx, %esi
	movq	32(%rsp), %rdx
	movq	__TVMBackendFreeWorkspace@GOTPCREL(%rip), %rax
	callq	*(%rax)
	testl	%eax, %eax
	movl	$-1, %eax
	movq	40(%rsp), %r15
	movq	__TVMBackendAllocWorkspace@GOTPCREL(%rip), %r9
	jne	.LBB4_44
	incq	%rbp
	addq	$8192, 48(%rsp)
	xorl	%eax, %eax
	cmpq	%r13, %rbp
	jne	.LBB4_5
	jmp	.LBB4_44
.LBB4_43:
	xorl	%eax, %eax
.LBB4_44:
	addq	$1496, %rsp
	.cfi_def_cfa_offset 56
	popq	%rbx
	.cfi_def_cfa_offset 48
	popq	%r12
	.cfi_def_cfa_offset 40
	popq	%r13
	.cfi_def_cfa_offset 32
	popq	%r14
	.cfi_def_cfa_offset 24
	popq	%r15
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.LBB4_45:
	.cfi_def_cfa_offset 1552
	movl	$-1, %eax
	jmp	.LBB4_44
.Lfunc_end4:
	.size	.L__tvm_parallel_lambda, .Lfunc_end4-.L__tvm_parallel_lambda
	.cfi_endproc

	.section	.text.tvm.fp16.conv,"ax",@progbits
	.weak	__truncsfhf2
	.p2align	4
	.type	__truncsfhf2,@function
__truncsfhf2:
.Lfunc_begin5:
	.cfi_startproc
	vmovd	%xmm0, %eax
	movl	%eax, %edx
	andl	$2147483647, %edx
	leal	-947912704(%rdx), %ecx
	leal	-1199570944(%rdx), %esi
	cmpl	%esi, %ecx
	jae	.LBB5_5
	movl	%eax, %edx
	shrl	$13, %edx
	movl	%eax, %esi
	andl	$8191, %esi
	cmpl	$4097, %esi
	jb	.LBB5_3
	addl	$-114687, %edx
	movl	%edx, %ecx
	jmp	.LBB5_13
.LBB5_5:
	cmpl	$2139095041, %edx
	jb	.LBB5_7
	movl	%eax, %ecx
	shrl	$13, %ecx
	andl	$511, %ecx
	orl	$32256, %ecx
	jmp	.LBB5_13
.LBB5_3:
	leal	-114688(%rdx), %ecx
	cmpl	$4096, %esi
	jne	.LBB5_13
	andl	$1, %edx
	addl	%edx, %ecx
	jmp	.LBB5_13
.LBB5_7:
	movl	$31744, %ecx
	cmpl	$1199570943, %edx
	ja	.LBB5_13
	xorl	%ecx, %ecx
	cmpl	$754974720, %edx
	jb	.LBB5_13
	shrl	$23, %edx
	movl	%eax, %ecx
	andl	$8388607, %ecx
	orl	$8388608, %ecx
	leal	-81(%rdx), %esi
	shlxl	%esi, %ecx, %esi
	xorl	%edi, %edi
	testl	%esi, %esi
	setne	%dil
	movb	$113, %sil
	subb	%dl, %sil
	shrxl	%esi, %ecx, %edx
	movl	%edx, %ecx
	shrl	$13, %ecx
	andl	$8191, %edx
	orl	%edi, %edx
	cmpl	$4097, %edx
	jb	.LBB5_11
	incl	%ecx
	jmp	.LBB5_13
.LBB5_11:
	cmpl	$4096, %edx
	jne	.LBB5_13
	movl	%ecx, %edx
	andl	$1, %edx
	addl	%edx, %ecx
.LBB5_13:
	shrl	$16, %eax
	andl	$32768, %eax
	orl	%ecx, %eax
	vpinsrw	$0, %eax, %xmm0, %xmm0
	retq
.Lfunc_end5:
	.size	__truncsfhf2, .Lfunc_end5-__truncsfhf2
	.cfi_endproc

	.weak	__extendhfsf2
	.p2align	4
	.type	__extendhfsf2,@function
__extendhfsf2:
.Lfunc_begin6:
	.cfi_startproc
	vpextrw	$0, %xmm0, %eax
	movl	%eax, %ecx
	andl	$32767, %ecx
	leal	-1024(%rcx), %edx
	movzwl	%dx, %edx
	cmpl	$30719, %edx
	ja	.LBB6_2
	shll	$13, %ecx
	addl	$939524096, %ecx
	jmp	.LBB6_7
.LBB6_2:
	cmpl	$31744, %ecx
	jb	.LBB6_4
	shll	$13, %ecx
	orl	$2139095040, %ecx
	jmp	.LBB6_7
.LBB6_4:
	testl	%ecx, %ecx
	je	.LBB6_5
	movl	%ecx, %edx
	shrl	$8, %edx
	xorl	%esi, %esi
	cmpl	$256, %ecx
	setb	%sil
	cmovbl	%ecx, %edx
	leal	24(,%rsi,8), %edi
	movl	%edx, %r8d
	shrl	$4, %r8d
	cmpl	$16, %edx
	leal	20(,%rsi,8), %esi
	cmovbl	%edx, %r8d
	cmovbl	%edi, %esi
	movl	%r8d, %edx
	shrl	$2, %edx
	leal	-2(%rsi), %edi
	cmpl	$4, %r8d
	cmovbl	%r8d, %edx
	cmovbl	%esi, %edi
	movl	%edx, %esi
	negl	%esi
	cmpl	$2, %edx
	movl	$-2, %edx
	cmovbl	%esi, %edx
	addl	%edi, %edx
	leal	-8(%rdx), %esi
	shlxl	%esi, %ecx, %esi
	xorl	$8388608, %esi
	shll	$23, %edx
	movl	$1124073472, %ecx
	subl	%edx, %ecx
	orl	%esi, %ecx
	jmp	.LBB6_7
.LBB6_5:
	xorl	%ecx, %ecx
.LBB6_7:
	andl	$32768, %eax
	shll	$16, %eax
	orl	%ecx, %eax
	vmovd	%eax, %xmm0
	retq
.Lfunc_end6:
	.size	__extendhfsf2, .Lfunc_end6-__extendhfsf2
	.cfi_endproc

	.type	__TVMBackendParallelLaunch,@object
	.bss
	.weak	__TVMBackendParallelLaunch
	.p2align	3, 0x0
__TVMBackendParallelLaunch:
	.quad	0
	.size	__TVMBackendParallelLaunch, 8

	.type	.L.str,@object
	.section	.rodata,"a",@progbits
.L.str:
	.asciz	"TypeError"
	.size	.L.str, 10

	.type	.L.str.1,@object
.L.str.1:
	.asciz	"Expected "
	.size	.L.str.1, 10

	.type	.L.str.2,@object
.L.str.2:
	.asciz	"6"
	.size	.L.str.2, 2

	.type	.L.str.3,@object
.L.str.3:
	.asciz	" arguments"
	.size	.L.str.3, 11

	.type	.L.str.4,@object
.L.str.4:
	.asciz	" when calling:\n  `"
	.size	.L.str.4, 19

	.type	.L.str.5,@object
.L.str.5:
	.asciz	"main(x: Tensor([rows, T.int64(4096)], bfloat16), packed: Tensor([T.int64(4096), T.int64(2048)], uint8), block_scale: Tensor([T.int64(4096), T.int64(256)], uint8), global_scale: Tensor([T.int64(1)], float32), bias: Tensor([T.int64(4096)], float32), y: Tensor([rows, T.int64(4096)], bfloat16))"
	.size	.L.str.5, 292

	.type	.L.str.6,@object
.L.str.6:
	.asciz	"`"
	.size	.L.str.6, 2

	.type	.L.str.7,@object
.L.str.7:
	.asciz	"args pointer is NULL"
	.size	.L.str.7, 21

	.type	.L.str.8,@object
.L.str.8:
	.asciz	"Mismatched type on argument #"
	.size	.L.str.8, 30

	.type	.L.str.9,@object
.L.str.9:
	.asciz	"0"
	.size	.L.str.9, 2

	.type	.L.str.10,@object
.L.str.10:
	.asciz	"`,\n  expected "
	.size	.L.str.10, 15

	.type	.L.str.11,@object
.L.str.11:
	.asciz	"Tensor"
	.size	.L.str.11, 7

	.type	.L.str.12,@object
.L.str.12:
	.asciz	"1"
	.size	.L.str.12, 2

	.type	.L.str.13,@object
.L.str.13:
	.asciz	"2"
	.size	.L.str.13, 2

	.type	.L.str.14,@object
.L.str.14:
	.asciz	"3"
	.size	.L.str.14, 2

	.type	.L.str.15,@object
.L.str.15:
	.asciz	"4"
	.size	.L.str.15, 2

	.type	.L.str.16,@object
.L.str.16:
	.asciz	"5"
	.size	.L.str.16, 2

	.type	.L.str.17,@object
.L.str.17:
	.asciz	"ValueError"
	.size	.L.str.17, 11

	.type	.L.str.18,@object
.L.str.18:
	.asciz	"Mismatched "
	.size	.L.str.18, 12

	.type	.L.str.19,@object
.L.str.19:
	.asciz	"x"
	.size	.L.str.19, 2

	.type	.L.str.20,@object
.L.str.20:
	.asciz	".ndim on argument #"
	.size	.L.str.20, 20

	.type	.L.str.21,@object
.L.str.21:
	.asciz	".dtype on argument #"
	.size	.L.str.21, 21

	.type	.L.str.22,@object
.L.str.22:
	.asciz	"bfloat16"
	.size	.L.str.22, 9

	.type	.L.str.23,@object
.L.str.23:
	.asciz	".device_type on argument #"
	.size	.L.str.23, 27

	.type	.L.str.24,@object
.L.str.24:
	.asciz	"cpu"
	.size	.L.str.24, 4

	.type	.L.str.25,@object
.L.str.25:
	.asciz	"packed"
	.size	.L.str.25, 7

	.type	.L.str.26,@object
.L.str.26:
	.asciz	"uint8"
	.size	.L.str.26, 6

	.type	.L.str.27,@object
.L.str.27:
	.asciz	"block_scale"
	.size	.L.str.27, 12

	.type	.L.str.28,@object
.L.str.28:
	.asciz	"global_scale"
	.size	.L.str.28, 13

	.type	.L.str.29,@object
.L.str.29:
	.asciz	"float32"
	.size	.L.str.29, 8

	.type	.L.str.30,@object
.L.str.30:
	.asciz	"bias"
	.size	.L.str.30, 5

	.type	.L.str.31,@object
.L.str.31:
	.asciz	"y"
	.size	.L.str.31, 2

	.type	.L.str.32,@object
.L.str.32:
	.asciz	".strides on argument #"
	.size	.L.str.32, 23

	.type	.L.str.33,@object
.L.str.33:
	.asciz	"`,\n  expected to be compact array"
	.size	.L.str.33, 34

	.type	.L.str.34,@object
.L.str.34:
	.asciz	" data pointer is NULL on argument #"
	.size	.L.str.34, 36

	.type	.L.str.35,@object
.L.str.35:
	.asciz	"`,\n  expected non-NULL data pointer"
	.size	.L.str.35, 36

	.type	.L.str.36,@object
.L.str.36:
	.asciz	"packed.device_id"
	.size	.L.str.36, 17

	.type	.L.str.37,@object
.L.str.37:
	.asciz	" on argument #"
	.size	.L.str.37, 15

	.type	.L.str.38,@object
.L.str.38:
	.asciz	"`,\n  expected to match "
	.size	.L.str.38, 24

	.type	.L.str.39,@object
.L.str.39:
	.asciz	"x.device_id"
	.size	.L.str.39, 12

	.type	.L.str.40,@object
.L.str.40:
	.asciz	"block_scale.device_id"
	.size	.L.str.40, 22

	.type	.L.str.41,@object
.L.str.41:
	.asciz	"global_scale.device_id"
	.size	.L.str.41, 23

	.type	.L.str.42,@object
.L.str.42:
	.asciz	"bias.device_id"
	.size	.L.str.42, 15

	.type	.L.str.43,@object
.L.str.43:
	.asciz	"y.shape[0]"
	.size	.L.str.43, 11

	.type	.L.str.44,@object
.L.str.44:
	.asciz	"x.shape[0]"
	.size	.L.str.44, 11

	.type	.L.str.45,@object
.L.str.45:
	.asciz	"y.device_id"
	.size	.L.str.45, 12

	.type	.L.str.46,@object
.L.str.46:
	.asciz	"Invalid "
	.size	.L.str.46, 9

	.type	.L.str.47,@object
.L.str.47:
	.asciz	"x.shape[1]"
	.size	.L.str.47, 11

	.type	.L.str.48,@object
.L.str.48:
	.asciz	"4096"
	.size	.L.str.48, 5

	.type	.L.str.49,@object
.L.str.49:
	.asciz	"x.byte_offset"
	.size	.L.str.49, 14

	.type	.L.str.50,@object
.L.str.50:
	.asciz	"packed.shape[0]"
	.size	.L.str.50, 16

	.type	.L.str.51,@object
.L.str.51:
	.asciz	"packed.shape[1]"
	.size	.L.str.51, 16

	.type	.L.str.52,@object
.L.str.52:
	.asciz	"2048"
	.size	.L.str.52, 5

	.type	.L.str.53,@object
.L.str.53:
	.asciz	"packed.byte_offset"
	.size	.L.str.53, 19

	.type	.L.str.54,@object
.L.str.54:
	.asciz	"block_scale.shape[0]"
	.size	.L.str.54, 21

	.type	.L.str.55,@object
.L.str.55:
	.asciz	"block_scale.shape[1]"
	.size	.L.str.55, 21

	.type	.L.str.56,@object
.L.str.56:
	.asciz	"256"
	.size	.L.str.56, 4

	.type	.L.str.57,@object
.L.str.57:
	.asciz	"block_scale.byte_offset"
	.size	.L.str.57, 24

	.type	.L.str.58,@object
.L.str.58:
	.asciz	"global_scale.shape[0]"
	.size	.L.str.58, 22

	.type	.L.str.59,@object
.L.str.59:
	.asciz	"global_scale.byte_offset"
	.size	.L.str.59, 25

	.type	.L.str.60,@object
.L.str.60:
	.asciz	"bias.shape[0]"
	.size	.L.str.60, 14

	.type	.L.str.61,@object
.L.str.61:
	.asciz	"bias.byte_offset"
	.size	.L.str.61, 17

	.type	.L.str.62,@object
.L.str.62:
	.asciz	"y.shape[1]"
	.size	.L.str.62, 11

	.type	.L.str.63,@object
.L.str.63:
	.asciz	"y.byte_offset"
	.size	.L.str.63, 14

	.type	__TVMBackendAllocWorkspace,@object
	.bss
	.weak	__TVMBackendAllocWorkspace
	.p2align	3, 0x0
__TVMBackendAllocWorkspace:
	.quad	0
	.size	__TVMBackendAllocWorkspace, 8

	.type	__TVMBackendFreeWorkspace,@object
	.weak	__TVMBackendFreeWorkspace
	.p2align	3, 0x0
__TVMBackendFreeWorkspace:
	.quad	0
	.size	__TVMBackendFreeWorkspace, 8

	.section	.debug_loc,"",@progbits
.Ldebug_loc0:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin0-.Lfunc_begin0
	.quad	.Ltmp85-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp85-.Lfunc_begin0
	.quad	.Ltmp146-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp146-.Lfunc_begin0
	.quad	.Ltmp147-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp147-.Lfunc_begin0
	.quad	.Ltmp148-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp148-.Lfunc_begin0
	.quad	.Ltmp149-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp149-.Lfunc_begin0
	.quad	.Ltmp150-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp150-.Lfunc_begin0
	.quad	.Ltmp151-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp151-.Lfunc_begin0
	.quad	.Ltmp152-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp152-.Lfunc_begin0
	.quad	.Ltmp153-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp153-.Lfunc_begin0
	.quad	.Ltmp154-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp154-.Lfunc_begin0
	.quad	.Ltmp155-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp155-.Lfunc_begin0
	.quad	.Ltmp156-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp156-.Lfunc_begin0
	.quad	.Ltmp157-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp157-.Lfunc_begin0
	.quad	.Ltmp159-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp159-.Lfunc_begin0
	.quad	.Ltmp160-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp160-.Lfunc_begin0
	.quad	.Ltmp163-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp163-.Lfunc_begin0
	.quad	.Ltmp164-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp164-.Lfunc_begin0
	.quad	.Ltmp168-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp168-.Lfunc_begin0
	.quad	.Ltmp169-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp169-.Lfunc_begin0
	.quad	.Ltmp170-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp170-.Lfunc_begin0
	.quad	.Ltmp171-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp171-.Lfunc_begin0
	.quad	.Ltmp172-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp172-.Lfunc_begin0
	.quad	.Ltmp173-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp173-.Lfunc_begin0
	.quad	.Ltmp174-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp174-.Lfunc_begin0
	.quad	.Ltmp175-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp175-.Lfunc_begin0
	.quad	.Ltmp176-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp176-.Lfunc_begin0
	.quad	.Ltmp177-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp177-.Lfunc_begin0
	.quad	.Ltmp178-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp178-.Lfunc_begin0
	.quad	.Ltmp179-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp179-.Lfunc_begin0
	.quad	.Ltmp180-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp180-.Lfunc_begin0
	.quad	.Ltmp181-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp181-.Lfunc_begin0
	.quad	.Ltmp182-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp182-.Lfunc_begin0
	.quad	.Ltmp183-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp183-.Lfunc_begin0
	.quad	.Ltmp184-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp184-.Lfunc_begin0
	.quad	.Ltmp185-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp185-.Lfunc_begin0
	.quad	.Ltmp186-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp186-.Lfunc_begin0
	.quad	.Ltmp187-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp187-.Lfunc_begin0
	.quad	.Ltmp188-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp188-.Lfunc_begin0
	.quad	.Ltmp189-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp189-.Lfunc_begin0
	.quad	.Ltmp190-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp190-.Lfunc_begin0
	.quad	.Ltmp191-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp191-.Lfunc_begin0
	.quad	.Ltmp192-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp192-.Lfunc_begin0
	.quad	.Ltmp193-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp193-.Lfunc_begin0
	.quad	.Ltmp194-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp194-.Lfunc_begin0
	.quad	.Ltmp195-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp195-.Lfunc_begin0
	.quad	.Ltmp196-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp196-.Lfunc_begin0
	.quad	.Ltmp197-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp197-.Lfunc_begin0
	.quad	.Ltmp198-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp198-.Lfunc_begin0
	.quad	.Ltmp199-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp199-.Lfunc_begin0
	.quad	.Ltmp200-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp200-.Lfunc_begin0
	.quad	.Ltmp201-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp201-.Lfunc_begin0
	.quad	.Ltmp202-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp202-.Lfunc_begin0
	.quad	.Ltmp203-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp203-.Lfunc_begin0
	.quad	.Lfunc_end0-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc1:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin0-.Lfunc_begin0
	.quad	.Ltmp87-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp87-.Lfunc_begin0
	.quad	.Ltmp146-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	84
	.byte	159
	.quad	.Ltmp146-.Lfunc_begin0
	.quad	.Ltmp167-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp167-.Lfunc_begin0
	.quad	.Ltmp168-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	84
	.byte	159
	.quad	.Ltmp168-.Lfunc_begin0
	.quad	.Ltmp204-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Lfunc_end0-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	84
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc2:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin0-.Lfunc_begin0
	.quad	.Ltmp9-.Lfunc_begin0
	.short	1
	.byte	81
	.quad	.Ltmp9-.Lfunc_begin0
	.quad	.Ltmp10-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	81
	.byte	159
	.quad	.Ltmp10-.Lfunc_begin0
	.quad	.Ltmp19-.Lfunc_begin0
	.short	1
	.byte	81
	.quad	.Ltmp19-.Lfunc_begin0
	.quad	.Ltmp159-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	81
	.byte	159
	.quad	.Ltmp159-.Lfunc_begin0
	.quad	.Ltmp161-.Lfunc_begin0
	.short	1
	.byte	81
	.quad	.Ltmp161-.Lfunc_begin0
	.quad	.Ltmp163-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	81
	.byte	159
	.quad	.Ltmp163-.Lfunc_begin0
	.quad	.Ltmp165-.Lfunc_begin0
	.short	1
	.byte	81
	.quad	.Ltmp165-.Lfunc_begin0
	.quad	.Lfunc_end0-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	81
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc3:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin0-.Lfunc_begin0
	.quad	.Ltmp6-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	.Ltmp6-.Lfunc_begin0
	.quad	.Ltmp10-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	82
	.byte	159
	.quad	.Ltmp10-.Lfunc_begin0
	.quad	.Ltmp12-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	.Ltmp12-.Lfunc_begin0
	.quad	.Ltmp159-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	82
	.byte	159
	.quad	.Ltmp159-.Lfunc_begin0
	.quad	.Ltmp162-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	.Ltmp162-.Lfunc_begin0
	.quad	.Ltmp163-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	82
	.byte	159
	.quad	.Ltmp163-.Lfunc_begin0
	.quad	.Ltmp166-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	.Ltmp166-.Lfunc_begin0
	.quad	.Lfunc_end0-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	82
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc4:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp2-.Lfunc_begin0
	.quad	.Ltmp5-.Lfunc_begin0
	.short	1
	.byte	80
	.quad	.Ltmp10-.Lfunc_begin0
	.quad	.Ltmp14-.Lfunc_begin0
	.short	1
	.byte	80
	.quad	0
	.quad	0
.Ldebug_loc5:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp6-.Lfunc_begin0
	.quad	.Ltmp7-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	0
	.quad	0
.Ldebug_loc6:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp18-.Lfunc_begin0
	.quad	.Ltmp19-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	0
	.quad	0
.Ldebug_loc7:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp25-.Lfunc_begin0
	.quad	.Ltmp26-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	0
	.quad	0
.Ldebug_loc8:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp32-.Lfunc_begin0
	.quad	.Ltmp33-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	0
	.quad	0
.Ldebug_loc9:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp39-.Lfunc_begin0
	.quad	.Ltmp40-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	0
	.quad	0
.Ldebug_loc10:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp84-.Lfunc_begin0
	.quad	.Ltmp88-.Lfunc_begin0
	.short	2
	.byte	114
	.byte	0
	.quad	.Ltmp97-.Lfunc_begin0
	.quad	.Ltmp143-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	48
	.byte	6
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp246-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	48
	.byte	6
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp253-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	48
	.byte	6
	.quad	.Ltmp254-.Lfunc_begin0
	.quad	.Ltmp256-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	48
	.byte	6
	.quad	.Ltmp257-.Lfunc_begin0
	.quad	.Ltmp259-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	48
	.byte	6
	.quad	.Ltmp261-.Lfunc_begin0
	.quad	.Ltmp290-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	48
	.byte	6
	.quad	0
	.quad	0
.Ldebug_loc11:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp85-.Lfunc_begin0
	.quad	.Ltmp144-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp205-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp208-.Lfunc_begin0
	.quad	.Ltmp209-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp213-.Lfunc_begin0
	.quad	.Ltmp214-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp216-.Lfunc_begin0
	.quad	.Ltmp217-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp220-.Lfunc_begin0
	.quad	.Ltmp221-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp223-.Lfunc_begin0
	.quad	.Ltmp224-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp225-.Lfunc_begin0
	.quad	.Ltmp226-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp228-.Lfunc_begin0
	.quad	.Ltmp229-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp230-.Lfunc_begin0
	.quad	.Ltmp231-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp232-.Lfunc_begin0
	.quad	.Ltmp233-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp234-.Lfunc_begin0
	.quad	.Ltmp235-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp236-.Lfunc_begin0
	.quad	.Ltmp237-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp238-.Lfunc_begin0
	.quad	.Ltmp239-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp240-.Lfunc_begin0
	.quad	.Ltmp241-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp242-.Lfunc_begin0
	.quad	.Ltmp243-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp244-.Lfunc_begin0
	.quad	.Ltmp245-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp250-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp254-.Lfunc_begin0
	.quad	.Ltmp255-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp257-.Lfunc_begin0
	.quad	.Ltmp258-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp261-.Lfunc_begin0
	.quad	.Ltmp262-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp263-.Lfunc_begin0
	.quad	.Ltmp264-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp265-.Lfunc_begin0
	.quad	.Ltmp266-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp268-.Lfunc_begin0
	.quad	.Ltmp269-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp270-.Lfunc_begin0
	.quad	.Ltmp271-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp272-.Lfunc_begin0
	.quad	.Ltmp273-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp275-.Lfunc_begin0
	.quad	.Ltmp276-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp277-.Lfunc_begin0
	.quad	.Ltmp278-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp280-.Lfunc_begin0
	.quad	.Ltmp281-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp282-.Lfunc_begin0
	.quad	.Ltmp283-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp285-.Lfunc_begin0
	.quad	.Ltmp286-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp287-.Lfunc_begin0
	.quad	.Ltmp288-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	0
	.quad	0
.Ldebug_loc12:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp86-.Lfunc_begin0
	.quad	.Ltmp100-.Lfunc_begin0
	.short	2
	.byte	121
	.byte	0
	.quad	.Ltmp208-.Lfunc_begin0
	.quad	.Ltmp212-.Lfunc_begin0
	.short	2
	.byte	121
	.byte	0
	.quad	0
	.quad	0
.Ldebug_loc13:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp87-.Lfunc_begin0
	.quad	.Ltmp144-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp246-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp252-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp254-.Lfunc_begin0
	.quad	.Ltmp256-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp257-.Lfunc_begin0
	.quad	.Ltmp259-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp261-.Lfunc_begin0
	.quad	.Ltmp290-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	0
	.quad	0
.Ldebug_loc14:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp88-.Lfunc_begin0
	.quad	.Ltmp89-.Lfunc_begin0
	.short	2
	.byte	114
	.byte	0
	.quad	.Ltmp97-.Lfunc_begin0
	.quad	.Ltmp143-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	40
	.byte	6
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp246-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	40
	.byte	6
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp253-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	40
	.byte	6
	.quad	.Ltmp254-.Lfunc_begin0
	.quad	.Ltmp256-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	40
	.byte	6
	.quad	.Ltmp257-.Lfunc_begin0
	.quad	.Ltmp259-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	40
	.byte	6
	.quad	.Ltmp261-.Lfunc_begin0
	.quad	.Ltmp290-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	40
	.byte	6
	.quad	0
	.quad	0
.Ldebug_loc15:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp89-.Lfunc_begin0
	.quad	.Ltmp106-.Lfunc_begin0
	.short	2
	.byte	114
	.byte	0
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp206-.Lfunc_begin0
	.short	2
	.byte	114
	.byte	0
	.quad	.Ltmp208-.Lfunc_begin0
	.quad	.Ltmp210-.Lfunc_begin0
	.short	2
	.byte	114
	.byte	0
	.quad	.Ltmp213-.Lfunc_begin0
	.quad	.Ltmp215-.Lfunc_begin0
	.short	2
	.byte	114
	.byte	0
	.quad	.Ltmp216-.Lfunc_begin0
	.quad	.Ltmp218-.Lfunc_begin0
	.short	2
	.byte	114
	.byte	0
	.quad	0
	.quad	0
.Ldebug_loc16:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp90-.Lfunc_begin0
	.quad	.Ltmp92-.Lfunc_begin0
	.short	2
	.byte	113
	.byte	0
	.quad	.Ltmp97-.Lfunc_begin0
	.quad	.Ltmp143-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	32
	.byte	6
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp246-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	32
	.byte	6
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp253-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	32
	.byte	6
	.quad	.Ltmp254-.Lfunc_begin0
	.quad	.Ltmp256-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	32
	.byte	6
	.quad	.Ltmp257-.Lfunc_begin0
	.quad	.Ltmp259-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	32
	.byte	6
	.quad	.Ltmp261-.Lfunc_begin0
	.quad	.Ltmp290-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	32
	.byte	6
	.quad	0
	.quad	0
.Ldebug_loc17:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp91-.Lfunc_begin0
	.quad	.Ltmp112-.Lfunc_begin0
	.short	2
	.byte	120
	.byte	0
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp207-.Lfunc_begin0
	.short	2
	.byte	120
	.byte	0
	.quad	.Ltmp208-.Lfunc_begin0
	.quad	.Ltmp211-.Lfunc_begin0
	.short	2
	.byte	120
	.byte	0
	.quad	.Ltmp213-.Lfunc_begin0
	.quad	.Ltmp219-.Lfunc_begin0
	.short	2
	.byte	120
	.byte	0
	.quad	.Ltmp220-.Lfunc_begin0
	.quad	.Ltmp222-.Lfunc_begin0
	.short	2
	.byte	120
	.byte	0
	.quad	.Ltmp223-.Lfunc_begin0
	.quad	.Ltmp227-.Lfunc_begin0
	.short	2
	.byte	120
	.byte	0
	.quad	0
	.quad	0
.Ldebug_loc18:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp92-.Lfunc_begin0
	.quad	.Ltmp93-.Lfunc_begin0
	.short	2
	.byte	113
	.byte	0
	.quad	.Ltmp97-.Lfunc_begin0
	.quad	.Ltmp143-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	24
	.byte	6
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp246-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	24
	.byte	6
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp253-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	24
	.byte	6
	.quad	.Ltmp254-.Lfunc_begin0
	.quad	.Ltmp256-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	24
	.byte	6
	.quad	.Ltmp257-.Lfunc_begin0
	.quad	.Ltmp259-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	24
	.byte	6
	.quad	.Ltmp261-.Lfunc_begin0
	.quad	.Ltmp290-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	24
	.byte	6
	.quad	0
	.quad	0
.Ldebug_loc19:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp93-.Lfunc_begin0
	.quad	.Ltmp95-.Lfunc_begin0
	.short	2
	.byte	113
	.byte	0
	.quad	.Ltmp97-.Lfunc_begin0
	.quad	.Ltmp143-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	16
	.byte	6
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp246-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	16
	.byte	6
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp253-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	16
	.byte	6
	.quad	.Ltmp254-.Lfunc_begin0
	.quad	.Ltmp256-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	16
	.byte	6
	.quad	.Ltmp257-.Lfunc_begin0
	.quad	.Ltmp259-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	16
	.byte	6
	.quad	.Ltmp261-.Lfunc_begin0
	.quad	.Ltmp290-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	16
	.byte	6
	.quad	0
	.quad	0
.Ldebug_loc20:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp94-.Lfunc_begin0
	.quad	.Ltmp119-.Lfunc_begin0
	.short	2
	.byte	118
	.byte	0
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp238-.Lfunc_begin0
	.short	2
	.byte	118
	.byte	0
	.quad	0
	.quad	0
.Ldebug_loc21:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp95-.Lfunc_begin0
	.quad	.Ltmp97-.Lfunc_begin0
	.short	2
	.byte	113
	.byte	0
	.quad	.Ltmp97-.Lfunc_begin0
	.quad	.Ltmp143-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	0
	.byte	6
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp246-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	0
	.byte	6
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp253-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	0
	.byte	6
	.quad	.Ltmp254-.Lfunc_begin0
	.quad	.Ltmp256-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	0
	.byte	6
	.quad	.Ltmp257-.Lfunc_begin0
	.quad	.Ltmp259-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	0
	.byte	6
	.quad	.Ltmp261-.Lfunc_begin0
	.quad	.Ltmp290-.Lfunc_begin0
	.short	3
	.byte	119
	.byte	0
	.byte	6
	.quad	0
	.quad	0
.Ldebug_loc22:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp96-.Lfunc_begin0
	.quad	.Ltmp126-.Lfunc_begin0
	.short	2
	.byte	125
	.byte	0
	.quad	.Ltmp204-.Lfunc_begin0
	.quad	.Ltmp244-.Lfunc_begin0
	.short	2
	.byte	125
	.byte	0
	.quad	.Ltmp249-.Lfunc_begin0
	.quad	.Ltmp254-.Lfunc_begin0
	.short	2
	.byte	125
	.byte	0
	.quad	0
	.quad	0
.Ldebug_loc23:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin3-.Lfunc_begin0
	.quad	.Ltmp303-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	.Ltmp303-.Lfunc_begin0
	.quad	.Ltmp310-.Lfunc_begin0
	.short	1
	.byte	95
	.quad	.Ltmp310-.Lfunc_begin0
	.quad	.Ltmp311-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	85
	.byte	159
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	1
	.byte	95
	.quad	0
	.quad	0
.Ldebug_loc24:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin3-.Lfunc_begin0
	.quad	.Ltmp306-.Lfunc_begin0
	.short	1
	.byte	84
	.quad	.Ltmp306-.Lfunc_begin0
	.quad	.Ltmp307-.Lfunc_begin0
	.short	1
	.byte	92
	.quad	.Ltmp307-.Lfunc_begin0
	.quad	.Ltmp311-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	84
	.byte	159
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Ltmp312-.Lfunc_begin0
	.short	1
	.byte	92
	.quad	.Ltmp312-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	2
	.byte	119
	.byte	12
	.quad	0
	.quad	0
.Ldebug_loc25:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin3-.Lfunc_begin0
	.quad	.Ltmp302-.Lfunc_begin0
	.short	1
	.byte	81
	.quad	.Ltmp302-.Lfunc_begin0
	.quad	.Ltmp307-.Lfunc_begin0
	.short	1
	.byte	86
	.quad	.Ltmp307-.Lfunc_begin0
	.quad	.Ltmp311-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	81
	.byte	159
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Ltmp315-.Lfunc_begin0
	.short	1
	.byte	86
	.quad	.Ltmp315-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	81
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc26:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin3-.Lfunc_begin0
	.quad	.Ltmp304-.Lfunc_begin0
	.short	1
	.byte	82
	.quad	.Ltmp304-.Lfunc_begin0
	.quad	.Ltmp307-.Lfunc_begin0
	.short	1
	.byte	93
	.quad	.Ltmp307-.Lfunc_begin0
	.quad	.Ltmp311-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	82
	.byte	159
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Ltmp313-.Lfunc_begin0
	.short	1
	.byte	93
	.quad	.Ltmp313-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	5
	.byte	119
	.byte	16
	.byte	148
	.byte	8
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc27:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin3-.Lfunc_begin0
	.quad	.Ltmp305-.Lfunc_begin0
	.short	1
	.byte	88
	.quad	.Ltmp305-.Lfunc_begin0
	.quad	.Ltmp308-.Lfunc_begin0
	.short	1
	.byte	83
	.quad	.Ltmp308-.Lfunc_begin0
	.quad	.Ltmp311-.Lfunc_begin0
	.short	4
	.byte	243
	.byte	1
	.byte	88
	.byte	159
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	1
	.byte	83
	.quad	0
	.quad	0
.Ldebug_loc28:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Lfunc_begin3-.Lfunc_begin0
	.quad	.Ltmp296-.Lfunc_begin0
	.short	1
	.byte	89
	.quad	.Ltmp296-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	5
	.byte	119
	.byte	24
	.byte	148
	.byte	8
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc29:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp297-.Lfunc_begin0
	.quad	.Ltmp308-.Lfunc_begin0
	.short	2
	.byte	115
	.byte	0
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	2
	.byte	115
	.byte	0
	.quad	0
	.quad	0
.Ldebug_loc30:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp298-.Lfunc_begin0
	.quad	.Ltmp307-.Lfunc_begin0
	.short	2
	.byte	125
	.byte	0
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Ltmp313-.Lfunc_begin0
	.short	2
	.byte	125
	.byte	0
	.quad	.Ltmp313-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	6
	.byte	119
	.byte	16
	.byte	148
	.byte	8
	.byte	6
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc31:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp299-.Lfunc_begin0
	.quad	.Ltmp307-.Lfunc_begin0
	.short	2
	.byte	118
	.byte	0
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Ltmp315-.Lfunc_begin0
	.short	2
	.byte	118
	.byte	0
	.quad	0
	.quad	0
.Ldebug_loc32:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp301-.Lfunc_begin0
	.quad	.Ltmp309-.Lfunc_begin0
	.short	1
	.byte	94
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	1
	.byte	94
	.quad	0
	.quad	0
.Ldebug_loc33:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp306-.Lfunc_begin0
	.quad	.Ltmp307-.Lfunc_begin0
	.short	2
	.byte	112
	.byte	0
	.quad	.Ltmp311-.Lfunc_begin0
	.quad	.Ltmp330-.Lfunc_begin0
	.short	2
	.byte	112
	.byte	0
	.quad	.Ltmp330-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	2
	.byte	124
	.byte	0
	.quad	0
	.quad	0
.Ldebug_loc34:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp313-.Lfunc_begin0
	.quad	.Lfunc_end3-.Lfunc_begin0
	.short	7
	.byte	127
	.byte	0
	.byte	16
	.byte	128
	.byte	32
	.byte	30
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc35:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp313-.Lfunc_begin0
	.quad	.Ltmp315-.Lfunc_begin0
	.short	3
	.byte	17
	.byte	0
	.byte	159
	.quad	.Ltmp315-.Lfunc_begin0
	.quad	.Ltmp329-.Lfunc_begin0
	.short	1
	.byte	85
	.quad	0
	.quad	0
.Ldebug_loc36:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp315-.Lfunc_begin0
	.quad	.Ltmp317-.Lfunc_begin0
	.short	1
	.byte	90
	.quad	.Ltmp318-.Lfunc_begin0
	.quad	.Ltmp319-.Lfunc_begin0
	.short	3
	.byte	17
	.byte	0
	.byte	159
	.quad	.Ltmp319-.Lfunc_begin0
	.quad	.Ltmp329-.Lfunc_begin0
	.short	1
	.byte	90
	.quad	0
	.quad	0
.Ldebug_loc37:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp315-.Lfunc_begin0
	.quad	.Ltmp316-.Lfunc_begin0
	.short	5
	.byte	117
	.byte	0
	.byte	63
	.byte	36
	.byte	159
	.quad	.Ltmp319-.Lfunc_begin0
	.quad	.Ltmp321-.Lfunc_begin0
	.short	5
	.byte	117
	.byte	0
	.byte	63
	.byte	36
	.byte	159
	.quad	.Ltmp323-.Lfunc_begin0
	.quad	.Ltmp326-.Lfunc_begin0
	.short	5
	.byte	117
	.byte	0
	.byte	63
	.byte	36
	.byte	159
	.quad	.Ltmp327-.Lfunc_begin0
	.quad	.Ltmp329-.Lfunc_begin0
	.short	5
	.byte	117
	.byte	0
	.byte	63
	.byte	36
	.byte	159
	.quad	0
	.quad	0
.Ldebug_loc38:
	.quad	-1
	.quad	.Lfunc_begin0
	.quad	.Ltmp322-.Lfunc_begin0
	.quad	.Ltmp323-.Lfunc_begin0
	.short	3
	.byte	17
	.byte	0
	.byte	159
	.quad	.Ltmp323-.Lfunc_begin0
	.quad	.Ltmp324-.Lfunc_begin0
	.short	6
	.byte	124
	.byte	0
	.byte	17
	.byte	32
	.byte	27
	.byte	159
	.quad	.Ltmp324-.Lfunc_begin0
	.quad	.Ltmp325-.Lfunc_begin0
	.short	9
	.byte	124
	.byte	0
	.byte	17
	.byte	32
	.byte	27
	.byte	17
	.byte	1
	.byte	34
	.byte	159
	.quad	.Ltmp327-.Lfunc_begin0
	.quad	.Ltmp329-.Lfunc_begin0
	.short	6
	.byte	124
	.byte	0
	.byte	17
	.byte	32
	.byte	27
	.byte	159
	.quad	0
	.quad	0
	.section	.debug_abbrev,"",@progbits
	.byte	1
	.byte	17
	.byte	1
	.byte	37
	.byte	14
	.byte	19
	.byte	5
	.byte	3
	.byte	14
	.byte	16
	.byte	23
	.byte	27
	.byte	14
	.ascii	"\264B"
	.byte	25
	.byte	17
	.byte	1
	.byte	85
	.byte	23
	.byte	0
	.byte	0
	.byte	2
	.byte	46
	.byte	1
	.byte	17
	.byte	1
	.byte	18
	.byte	6
	.byte	64
	.byte	24
	.byte	3
	.byte	14
	.byte	39
	.byte	25
	.byte	73
	.byte	19
	.byte	0
	.byte	0
	.byte	3
	.byte	5
	.byte	0
	.byte	2
	.byte	23
	.byte	3
	.byte	14
	.byte	73
	.byte	19
	.byte	0
	.byte	0
	.byte	4
	.byte	52
	.byte	0
	.byte	2
	.byte	23
	.byte	3
	.byte	14
	.byte	73
	.byte	19
	.byte	0
	.byte	0
	.byte	5
	.byte	5
	.byte	0
	.byte	2
	.byte	24
	.byte	3
	.byte	14
	.byte	73
	.byte	19
	.byte	0
	.byte	0
	.byte	6
	.byte	52
	.byte	0
	.byte	2
	.byte	24
	.byte	3
	.byte	14
	.byte	73
	.byte	19
	.byte	0
	.byte	0
	.byte	7
	.byte	36
	.byte	0
	.byte	3
	.byte	14
	.byte	62
	.byte	11
	.byte	11
	.byte	11
	.byte	0
	.byte	0
	.byte	8
	.byte	15
	.byte	0
	.byte	0
	.byte	0
	.byte	9
	.byte	15
	.byte	0
	.byte	73
	.byte	19
	.byte	0
	.byte	0
	.byte	0
	.section	.debug_info,"",@progbits
.Lcu_begin0:
	.long	.Ldebug_info_end0-.Ldebug_info_start0
.Ldebug_info_start0:
	.short	4
	.long	.debug_abbrev
	.byte	8
	.byte	1
	.long	.Linfo_string0
	.short	2
	.long	.Linfo_string1
	.long	.Lline_table_start0
	.long	.Linfo_string2

	.quad	0
	.long	.Ldebug_ranges0
	.byte	2
	.quad	.Lfunc_begin0
	.long	.Lfunc_end0-.Lfunc_begin0
	.byte	5
	.byte	156
	.byte	17
	.ascii	"\220\177"
	.byte	34
	.long	.Linfo_string3

	.long	643
	.byte	3
	.long	.Ldebug_loc0
	.long	.Linfo_string6
	.long	650
	.byte	3
	.long	.Ldebug_loc1
	.long	.Linfo_string7
	.long	650
	.byte	3
	.long	.Ldebug_loc2
	.long	.Linfo_string8
	.long	643
	.byte	3
	.long	.Ldebug_loc3
	.long	.Linfo_string9
	.long	650
	.byte	4
	.long	.Ldebug_loc4
	.long	.Linfo_string10
	.long	643
	.byte	4
	.long	.Ldebug_loc5
	.long	.Linfo_string11
	.long	643
	.byte	4
	.long	.Ldebug_loc6
	.long	.Linfo_string12
	.long	643
	.byte	4
	.long	.Ldebug_loc7
	.long	.Linfo_string13
	.long	643
	.byte	4
	.long	.Ldebug_loc8
	.long	.Linfo_string14
	.long	643
	.byte	4
	.long	.Ldebug_loc9
	.long	.Linfo_string15
	.long	643
	.byte	4
	.long	.Ldebug_loc10
	.long	.Linfo_string16
	.long	651
	.byte	4
	.long	.Ldebug_loc11
	.long	.Linfo_string18
	.long	656
	.byte	4
	.long	.Ldebug_loc12
	.long	.Linfo_string19
	.long	651
	.byte	4
	.long	.Ldebug_loc13
	.long	.Linfo_string20
	.long	643
	.byte	4
	.long	.Ldebug_loc14
	.long	.Linfo_string21
	.long	651
	.byte	4
	.long	.Ldebug_loc15
	.long	.Linfo_string22
	.long	651
	.byte	4
	.long	.Ldebug_loc16
	.long	.Linfo_string23
	.long	651
	.byte	4
	.long	.Ldebug_loc17
	.long	.Linfo_string24
	.long	651
	.byte	4
	.long	.Ldebug_loc18
	.long	.Linfo_string25
	.long	651
	.byte	4
	.long	.Ldebug_loc19
	.long	.Linfo_string26
	.long	651
	.byte	4
	.long	.Ldebug_loc20
	.long	.Linfo_string27
	.long	651
	.byte	4
	.long	.Ldebug_loc21
	.long	.Linfo_string28
	.long	651
	.byte	4
	.long	.Ldebug_loc22
	.long	.Linfo_string29
	.long	651
	.byte	0
	.byte	2
	.quad	.Lfunc_begin3
	.long	.Lfunc_end3-.Lfunc_begin3
	.byte	1
	.byte	87
	.long	.Linfo_string5

	.long	643
	.byte	3
	.long	.Ldebug_loc23
	.long	.Linfo_string18
	.long	656
	.byte	3
	.long	.Ldebug_loc24
	.long	.Linfo_string20
	.long	643
	.byte	3
	.long	.Ldebug_loc25
	.long	.Linfo_string30
	.long	663
	.byte	3
	.long	.Ldebug_loc26
	.long	.Linfo_string32
	.long	675
	.byte	3
	.long	.Ldebug_loc27
	.long	.Linfo_string34
	.long	675
	.byte	3
	.long	.Ldebug_loc28
	.long	.Linfo_string35
	.long	687
	.byte	5
	.byte	3
	.byte	145
	.ascii	"\240\001"
	.long	.Linfo_string37
	.long	687
	.byte	5
	.byte	3
	.byte	145
	.ascii	"\250\001"
	.long	.Linfo_string38
	.long	663
	.byte	6
	.byte	6
	.byte	145
	.byte	24
	.byte	148
	.byte	8
	.byte	6
	.byte	159
	.long	.Linfo_string35
	.long	687
	.byte	4
	.long	.Ldebug_loc29
	.long	.Linfo_string34
	.long	675
	.byte	4
	.long	.Ldebug_loc30
	.long	.Linfo_string32
	.long	675
	.byte	4
	.long	.Ldebug_loc31
	.long	.Linfo_string30
	.long	663
	.byte	4
	.long	.Ldebug_loc32
	.long	.Linfo_string39
	.long	656
	.byte	4
	.long	.Ldebug_loc33
	.long	.Linfo_string40
	.long	663
	.byte	4
	.long	.Ldebug_loc34
	.long	.Linfo_string41
	.long	656
	.byte	4
	.long	.Ldebug_loc35
	.long	.Linfo_string42
	.long	656
	.byte	4
	.long	.Ldebug_loc36
	.long	.Linfo_string43
	.long	656
	.byte	4
	.long	.Ldebug_loc37
	.long	.Linfo_string44
	.long	656
	.byte	4
	.long	.Ldebug_loc38
	.long	.Linfo_string45
	.long	656
	.byte	0
	.byte	7
	.long	.Linfo_string4
	.byte	5
	.byte	4
	.byte	8
	.byte	9
	.long	656
	.byte	7
	.long	.Linfo_string17
	.byte	5
	.byte	8
	.byte	9
	.long	668
	.byte	7
	.long	.Linfo_string31
	.byte	7
	.byte	2
	.byte	9
	.long	680
	.byte	7
	.long	.Linfo_string33
	.byte	7
	.byte	1
	.byte	9
	.long	692
	.byte	7
	.long	.Linfo_string36
	.byte	4
	.byte	4
	.byte	0
.Ldebug_info_end0:
	.section	.debug_ranges,"",@progbits
.Ldebug_ranges0:
	.quad	.Lfunc_begin0
	.quad	.Lfunc_end0
	.quad	.Lfunc_begin3
	.quad	.Lfunc_end3
	.quad	0
	.quad	0
	.section	.debug_str,"MS",@progbits,1
.Linfo_string0:
	.asciz	"TVM"
.Linfo_string1:
	.asciz	"IRModule.CodeGenLLVM"
.Linfo_string2:
	.asciz	"."
.Linfo_string3:
	.asciz	"__tvm_ffi_main"
.Linfo_string4:
	.asciz	"int32"
.Linfo_string5:
	.asciz	"main_compute_"
.Linfo_string6:
	.asciz	"self_handle"
.Linfo_string7:
	.asciz	"args"
.Linfo_string8:
	.asciz	"num_args"
.Linfo_string9:
	.asciz	"result"
.Linfo_string10:
	.asciz	"x.type_index"
.Linfo_string11:
	.asciz	"packed.type_index"
.Linfo_string12:
	.asciz	"block_scale.type_index"
.Linfo_string13:
	.asciz	"global_scale.type_index"
.Linfo_string14:
	.asciz	"bias.type_index"
.Linfo_string15:
	.asciz	"y.type_index"
.Linfo_string16:
	.asciz	"main.x_shape"
.Linfo_string17:
	.asciz	"int64"
.Linfo_string18:
	.asciz	"rows"
.Linfo_string19:
	.asciz	"main.x_strides"
.Linfo_string20:
	.asciz	"dev_id"
.Linfo_string21:
	.asciz	"main.packed_shape"
.Linfo_string22:
	.asciz	"main.packed_strides"
.Linfo_string23:
	.asciz	"main.block_scale_shape"
.Linfo_string24:
	.asciz	"main.block_scale_strides"
.Linfo_string25:
	.asciz	"main.global_scale_shape"
.Linfo_string26:
	.asciz	"main.bias_shape"
.Linfo_string27:
	.asciz	"main.bias_strides"
.Linfo_string28:
	.asciz	"main.y_shape"
.Linfo_string29:
	.asciz	"main.y_strides"
.Linfo_string30:
	.asciz	"x"
.Linfo_string31:
	.asciz	"uint16"
.Linfo_string32:
	.asciz	"packed"
.Linfo_string33:
	.asciz	"uint8"
.Linfo_string34:
	.asciz	"block_scale"
.Linfo_string35:
	.asciz	"global_scale"
.Linfo_string36:
	.asciz	"float32"
.Linfo_string37:
	.asciz	"bias"
.Linfo_string38:
	.asciz	"y"
.Linfo_string39:
	.asciz	"cse_v7"
.Linfo_string40:
	.asciz	"A"
.Linfo_string41:
	.asciz	"cse_v1"
.Linfo_string42:
	.asciz	"t"
.Linfo_string43:
	.asciz	"i"
.Linfo_string44:
	.asciz	"cse_v2"
.Linfo_string45:
	.asciz	"k_0"
	.section	.debug_pubnames,"",@progbits
	.long	.LpubNames_end0-.LpubNames_start0
.LpubNames_start0:
	.short	2
	.long	.Lcu_begin0
	.long	700
	.long	42
	.asciz	"__tvm_ffi_main"
	.long	369
	.asciz	"main_compute_"
	.long	0
.LpubNames_end0:
	.section	.debug_pubtypes,"",@progbits
	.long	.LpubTypes_end0-.LpubTypes_start0
.LpubTypes_start0:
	.short	2
	.long	.Lcu_begin0
	.long	700
	.long	643
	.asciz	"int32"
	.long	656
	.asciz	"int64"
	.long	668
	.asciz	"uint16"
	.long	680
	.asciz	"uint8"
	.long	692
	.asciz	"float32"
	.long	0
.LpubTypes_end0:
	.section	".note.GNU-stack","",@progbits
	.section	.debug_line,"",@progbits
.Lline_table_start0:
